# SPDX-License-Identifier: Apache-2.0
"""CUDA tensors: the same plans, issued natively to streams and NCCL, folded by kernels with the bits of CPU folds.

    libraries     the driver, NCCL and NVRTC of this process
    compile       kernel sources to machine code
    kernels       kernels of one device
    bounded_plan  the plan of a call, its scratch within bounds; gathering: parts of it that NCCL moves
    program       a plan as operations on streams
    native        detcomm_cuda.h, which issues a program; native_call: one call a collective
    events, nccl  events; an own communicator
    communicator  the collectives of one group on one device
    watch         timeouts and errors of what runs on the GPU
    self_check    golden vectors, once a device
    works, group  what torch sees

Nothing here is imported before the first CUDA tensor comes.
"""
