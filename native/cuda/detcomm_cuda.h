/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libdetcomm_cuda.so: issues a plan to CUDA streams and NCCL, one call a collective. A contract in C99.
 *
 * It links neither CUDA nor NCCL: whoever calls hands over a table of the functions that it needs, found in the
 * libraries that the process has loaded already. So it is built without a toolkit, serves every version of both, and is
 * tested on a machine without a GPU against a table of fakes.
 *
 * A program is a plan made ready: operations on regions of three buffers. It says nothing of addresses, so one program
 * serves every call of its kind. It is made by detcomm/cuda/program.py and decides nothing here.
 *
 * dc_cuda_issue keeps no state, allocates nothing, takes no lock, and waits only where the functions of the table do.
 * Calls for one communicator must not overlap.
 */
#ifndef DETCOMM_CUDA_H
#define DETCOMM_CUDA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DC_CUDA_ABI_VERSION 2

/* Operands of one fold, the output not counted: what a kernel's parameters (4 KiB) have room for. */
#define DC_CUDA_MAX_OPERANDS 480

/* Copies of one operation: kMostCopies of native/kernels/copy.cu. */
#define DC_CUDA_MAX_COPIES 64

/* The functions, by the names of their libraries. Each returns 0 for success. */
typedef struct dc_cuda_functions {
  int (*ncclGroupStart)(void);
  int (*ncclGroupEnd)(void);
  int (*ncclSend)(const void *data, size_t count, int type, int peer, void *comm, void *stream);
  int (*ncclRecv)(void *data, size_t count, int type, int peer, void *comm, void *stream);
  int (*ncclAllGather)(const void *send, void *recv, size_t send_count, int type, void *comm, void *stream);
  int (*cuLaunchKernel)(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **parameters,
                        void **extra);
  int (*cuEventRecord)(void *event, void *stream);
  int (*cuStreamWaitEvent)(void *stream, void *event, unsigned flags);
  int (*cuCtxSetCurrent)(void *context);
} dc_cuda_functions;

typedef enum dc_cuda_kind {
  DC_CUDA_FOLD = 0,     /* regions: the operands in leaf order, then the output */
  DC_CUDA_COPY = 1,     /* regions: source, destination, source, destination, ...; all may run at once */
  DC_CUDA_EXCHANGE = 2, /* regions: num_sends that are sent, then those that are received; one NCCL group */
  DC_CUDA_RECORD = 3,   /* record events[event] on the stream */
  DC_CUDA_WAIT = 4,     /* the stream waits for events[event] */
  DC_CUDA_GATHER = 5    /* regions: what this rank gives, then the whole in rank order; one ncclAllGather */
} dc_cuda_kind;

typedef struct dc_cuda_region {
  uint64_t offset;
  uint64_t num_bytes;
  int32_t buffer; /* 0 input, 1 output, 2 scratch */
  int32_t peer;   /* of a message */
} dc_cuda_region;

typedef struct dc_cuda_op {
  int32_t kind;
  int32_t stream; /* 0 or 1, an index into dc_cuda_call.streams */
  uint32_t first_region;
  uint32_t num_regions;
  uint32_t num_sends;
  uint32_t num_blocks; /* of a kernel, in x */
  uint32_t event;
  uint32_t reserved;
  void *kernel;
  uint64_t count;   /* elements of a fold */
  uint64_t divisor; /* what a fold that divides divides by */
} dc_cuda_op;

typedef struct dc_cuda_program {
  const dc_cuda_op *ops;
  const dc_cuda_region *regions;
  uint64_t num_ops;
  uint64_t num_regions;
} dc_cuda_program;

typedef struct dc_cuda_call {
  void *comm;
  void *streams[2];
  void *const *events;
  void *buffers[3]; /* input, output, scratch */
  void *caller;     /* if begin is not NULL: the stream that streams[0] continues, by way of this event */
  void *begin;
  void *after;      /* if not NULL: an event that streams[0] waits for first */
  void *done;       /* if not NULL: recorded on streams[0] at the end */
  void *context;    /* of the device; made this thread's */
} dc_cuda_call;

typedef struct dc_cuda_failure {
  const char *function; /* that failed */
  int32_t code;         /* what it returned */
  uint64_t op;          /* the operation; num_ops for the call's own events */
} dc_cuda_failure;

/*
 * Issues all operations in order. 0, or -1 after the first function that failed: `failure` says which, and the
 * communicator is to be aborted, since its peers wait for what was not issued.
 */
int dc_cuda_issue(const dc_cuda_program *program, const dc_cuda_functions *functions, const dc_cuda_call *call,
                  dc_cuda_failure *failure);

/* DC_CUDA_ABI_VERSION of the library as built. */
uint32_t dc_cuda_abi_version(void);

#ifdef __cplusplus
}
#endif
#endif
