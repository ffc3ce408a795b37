"""Compiles one CUDA source with NVRTC, NVIDIA's library for compilation at run time. This program runs in the jail,
which restricts untrusted processes, in the folder that holds the sources.

``python nvrtc.py REQUEST`` takes a request in JSON (made by ``Builder.kernels``), and prints the log to stderr. It
writes the binary to ``kernels.cubin``, and to ``names.json`` the mangled name of each C++ name in the request. NVRTC
has no host headers, such as ``<cstdint>``, so the program supplies a few that kernels often include."""

import ctypes
import json
import os
import sys

_INTEGERS = "".join(
    f"typedef {'unsigned ' * (sign == 'u')}{'signed ' * (sign == '' and kind == 'char')}{kind} {sign}int{bits}_t;\n"
    for sign in ("", "u")
    for bits, kind in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))
)
_LIMITS = """
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define DBL_MAX __DBL_MAX__
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
#ifndef NAN
#define NAN __int_as_float(0x7fffffff)
#endif
"""
_HEADERS = {
    "cuda_runtime.h": "", "cuda.h": "", "device_launch_parameters.h": "", "cuda_runtime_api.h": "",
    "stdint.h": _INTEGERS, "cstdint": _INTEGERS, "math.h": _LIMITS, "cmath": _LIMITS, "float.h": _LIMITS,
    "cfloat": _LIMITS, "limits.h": _LIMITS, "climits": _LIMITS, "stdio.h": "", "cstdio": "", "stddef.h": "",
    "cstddef": "", "stdlib.h": "", "cstdlib": "", "assert.h": "", "cassert": "", "string.h": "", "cstring": "",
}  # fmt: skip
_GUARD = "#pragma once\n"


def main() -> int:
    request = json.loads(sys.argv[1])
    folder = os.path.dirname(request["library"])
    for name in sorted(os.listdir(folder)):  # NVRTC looks a header up by name, in any folder
        if name.startswith("libnvrtc-builtins.so."):
            ctypes.CDLL(f"{folder}/{name}")
    nvrtc = ctypes.CDLL(request["library"])

    program = ctypes.c_void_p()
    with open(request["unit"], "rb") as file:
        source = file.read()
    names = [name.encode() for name in _HEADERS]
    contents = [(_GUARD + text).encode() for text in _HEADERS.values()]
    texts = (ctypes.c_char_p * len(names))(*contents), (ctypes.c_char_p * len(names))(*names)
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, request["unit"].encode(), len(names), *texts):
        print("error: NVRTC does not start", file=sys.stderr)
        return 1
    for expression in request["expressions"]:
        nvrtc.nvrtcAddNameExpression(program, expression.encode())
    options = [
        f"--gpu-architecture={request['architecture']}", "--std=c++17", "--use_fast_math",
        "--extra-device-vectorization", "--device-as-default-execution-space", "-I.",
        "--display-error-number", "--diag-suppress=177,550,128", "-lineinfo",
        *(f"-I{folder}" for folder in request["includes"]),
    ]  # fmt: skip
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    refused = nvrtc.nvrtcCompileProgram(program, len(options), given)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    print(log.value.decode(errors="replace"), file=sys.stderr)
    if refused:
        return 1
    lowered = {}
    for expression in request["expressions"]:
        name = ctypes.c_char_p()
        nvrtc.nvrtcGetLoweredName(program, expression.encode(), ctypes.byref(name))
        lowered[expression] = (name.value or b"").decode()
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, image)
    with open("kernels.cubin", "wb") as cubin:
        cubin.write(image.raw)
    with open("names.json", "w") as found:
        json.dump(lowered, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
