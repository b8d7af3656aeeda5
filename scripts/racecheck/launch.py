"""Launches kernels of handover.ptx, one block of 128 threads each, through the driver: launch.py FILE KERNEL..."""

import ctypes
import sys

cuda = ctypes.CDLL("libcuda.so.1")


def call(name, *arguments):
    code = getattr(cuda, name)(*arguments)
    if code:
        sys.exit(f"{name}: error {code}")


device, context, module, kernel = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
call("cuInit", 0)
call("cuDeviceGet", ctypes.byref(device), 0)
call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
call("cuCtxSetCurrent", context)
with open(sys.argv[1], "rb") as file:
    call("cuModuleLoadData", ctypes.byref(module), file.read() + b"\0")
memory = ctypes.c_uint64()
call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(512))
call("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(128))
arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.byref(memory), ctypes.c_void_p))
for name in sys.argv[2:]:
    call("cuModuleGetFunction", ctypes.byref(kernel), module, name.encode())
    call("cuLaunchKernel", kernel, 1, 1, 1, 128, 1, 1, 0, None, arguments, None)
    call("cuCtxSynchronize")
