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

#define DC_CUDA_ABI_VERSION 3

/* Operands of one fold, the output not counted: what a kernel's parameters (4 KiB) have room for. */
#define DC_CUDA_MAX_OPERANDS 480

/* Copies of one operation: kMostCopies of native/kernels/copy.cu. */
#define DC_CUDA_MAX_COPIES 64

/* Ranks of one block that map each other's memory: kMostPeers of native/kernels/peers.cuh. */
#define DC_CUDA_MAX_PEERS 16

/* Operands of one fold whose operands may lie in peers' memory. */
#define DC_CUDA_MAX_PEER_OPERANDS 128

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
  DC_CUDA_GATHER = 5,   /* regions: what this rank gives, then the whole in rank order; one ncclAllGather */
  DC_CUDA_SYNC = 6,     /* signals: to peers, then waits for theirs; one block */
  DC_CUDA_PEER_FOLD = 7, /* as FOLD, and operands may lie in peers' memory */
  DC_CUDA_PEER_COPY = 8, /* as COPY, and sources may lie in peers' memory */
  DC_CUDA_PEER_FUSED = 9 /* a whole call; regions: what is staged; operands; if there are any, the output; what is fetched
                            to; source and destination of copies. parts[] counts them. `staged` is an offset in a slice
                            of `peer`, whose operands are in buffer 3 */
} dc_cuda_kind;

typedef struct dc_cuda_region {
  uint64_t offset;
  uint64_t num_bytes;
  int32_t buffer;  /* 0 input, 1 output, 2 scratch; of a peer: 3 its staging area, 4 its input, 5 its output */
  int32_t peer;    /* of a message: a rank; of a peer's buffer: its index in the block */
  uint64_t staged; /* of a peer's input or output: where it lies in its staging area, unless the peer left it in place */
} dc_cuda_region;

/* What one SYNC does with one peer; `Signal` of native/kernels/peers.cuh says how. */
typedef struct dc_cuda_signal {
  uint32_t peer;    /* its index in the block */
  uint32_t ready;   /* 1: tell it that what it is to read is there */
  uint32_t awaited; /* 1: wait until it has told the same */
  uint32_t done;    /* of how many of its messages to tell it that they have been read */
  int32_t most;     /* wait until it has read all but so many of ours; below 0: do not */
  uint32_t flags;   /* 1: tell with `ready` where our input and output lie; 2: take the same from it when awaited */
} dc_cuda_signal;

/* The memory that the ranks of a block have mapped, for one call. Addresses are of this process. */
typedef struct dc_cuda_peers {
  void *staging[DC_CUDA_MAX_PEERS]; /* by index */
  void *pads[DC_CUDA_MAX_PEERS];
  const void *table;   /* bases of all regions, by index and region */
  void *words;         /* of the host: abort, error, ... */
  uint64_t patience_ns;
  uint64_t places[2];  /* where our input and output lie, as a region and an offset in it; 0: nowhere that peers can read */
  uint64_t fused_offset; /* in each staging area, of the slices of PEER_FUSED */
  uint64_t slice_bytes;  /* of one block */
  uint64_t pad_bytes;    /* of one block's pad; the first is SYNC's */
  uint32_t index;        /* of this rank */
  uint32_t num_peers;
} dc_cuda_peers;

typedef struct dc_cuda_op {
  int32_t kind;
  int32_t stream; /* 0 or 1, an index into dc_cuda_call.streams */
  uint32_t first_region; /* of a SYNC: of its signals */
  uint32_t num_regions;
  uint32_t num_sends;
  uint32_t num_blocks; /* of a kernel, in x */
  uint32_t event;
  uint32_t num_rounds; /* of a PEER_FUSED: 2 if results go round */
  uint32_t parts[4];   /* of a PEER_FUSED: regions that are staged, operands, fetched to; copies */
  void *kernel;
  uint64_t count;   /* elements of a fold */
  uint64_t divisor; /* what a fold that divides divides by */
} dc_cuda_op;

typedef struct dc_cuda_program {
  const dc_cuda_op *ops;
  const dc_cuda_region *regions;
  const dc_cuda_signal *signals;
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
  const dc_cuda_peers *peers; /* NULL if the program has nothing to do with them */
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
