// The executor of the plan format on the CPU: runs the nodes of a plan in order and spreads the blocks of a kernel node over
// a few threads that wait between calls.  Ours, built once; a candidate's library only exports the kernels.
// It covers no error handling: a kernel that faults takes its single-use process with it.
#include <linux/futex.h>
#include <pthread.h>
#include <stdint.h>
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
unsigned generation = 0;  // a futex; a new value is a new node
node* nodes_of[2];        // by the generation's parity
uint64_t ticket;          // generation << 32 | next block
long finished;            // blocks of the node under way

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Blocks are taken by comparing and swapping the ticket: a helper that wakes late, in a later node, takes none by mistake.
void work() {
  for (;;) {
    uint64_t now = __atomic_load_n(&ticket, __ATOMIC_ACQUIRE);
    node* n = __atomic_load_n(&nodes_of[(now >> 32) & 1], __ATOMIC_RELAXED);
    const long block = (long)(uint32_t)now, grid = n->grid;
    if (block >= grid) return;
    if (!__atomic_compare_exchange_n(&ticket, &now, now + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) continue;
    n->kernel(block, grid, n->args);
    __atomic_fetch_add(&finished, 1, __ATOMIC_RELEASE);
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
  }
}
}  // namespace

extern "C" void start(long threads) {
  static node nothing;
  nodes_of[0] = nodes_of[1] = &nothing;
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
    const unsigned next = generation + 1;
    __atomic_store_n(&nodes_of[next & 1], n, __ATOMIC_RELAXED);
    __atomic_store_n(&finished, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&ticket, (uint64_t)next << 32, __ATOMIC_RELEASE);
    __atomic_store_n(&generation, next, __ATOMIC_RELEASE);
    syscall(SYS_futex, &generation, FUTEX_WAKE_PRIVATE, helpers, nullptr, nullptr, 0);
    work();
    while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < n->grid) relax();
  }
}
