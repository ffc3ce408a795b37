// The executor of the plan lane on the CPU: runs the nodes of a plan in order and spreads the blocks of a kernel node over
// a few threads that wait between calls.  Ours, built once; a candidate's library only exports the kernels.
// It covers no error handling: a kernel that faults takes its single-use process with it.
#include <linux/futex.h>
#include <pthread.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*kernel_fn)(long block, long grid, void** args);

struct node {
  kernel_fn kernel;  // null: memset
  long grid;
  void** args;
  void* target;
  long bytes;
  int value;
};

namespace {
constexpr int kSpins = 4000;  // a few microseconds: the gap between two nodes, not the gap between two calls
long helpers = 0;
node* current;
unsigned generation = 0;  // a futex; a new value is a new node
long next_block, busy;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void work() {
  for (;;) {
    long block = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
    if (block >= current->grid) return;
    current->kernel(block, current->grid, current->args);
  }
}

void* helper(void*) {
  unsigned seen = 0;
  for (;;) {
    unsigned now = seen;
    for (int i = 0; i < kSpins && now == seen; i++) {
      relax();
      now = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
    }
    while (now == seen) {
      syscall(SYS_futex, &generation, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
      now = __atomic_load_n(&generation, __ATOMIC_ACQUIRE);
    }
    seen = now;
    work();
    __atomic_fetch_sub(&busy, 1, __ATOMIC_RELEASE);
  }
}
}  // namespace

extern "C" void start(long threads) {
  for (long i = 1; i < threads; i++) {
    pthread_t thread;
    if (pthread_create(&thread, nullptr, helper, nullptr) == 0) helpers++;
  }
}

extern "C" void run(node* nodes, long count) {
  for (long i = 0; i < count; i++) {
    node* n = nodes + i;
    if (!n->kernel) {
      memset(n->target, n->value, n->bytes);
      continue;
    }
    if (helpers == 0 || n->grid <= 1) {
      for (long block = 0; block < n->grid; block++) n->kernel(block, n->grid, n->args);
      continue;
    }
    current = n;
    __atomic_store_n(&next_block, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&busy, helpers, __ATOMIC_RELAXED);
    __atomic_fetch_add(&generation, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, helpers, nullptr, nullptr, 0);
    work();
    while (__atomic_load_n(&busy, __ATOMIC_ACQUIRE) > 0) relax();
  }
}
