/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Collectives over shared memory: the ranks of one group, on one host, in one native call each.
 *
 * Every rank owns one segment of memory that all its peers have mapped. How the segments are made, found and mapped is
 * the caller's business (detcomm/transports/shared_memory.py); this library gets their addresses. So the ranks may as
 * well be threads of one process, which is how native/tests/test_shm.cpp runs them under the sanitizers.
 *
 * Rules for all functions that take a group:
 *   - one thread at a time, but dc_shm_abort, which any thread may call;
 *   - all ranks call them in the same order (dc_shm_exchange may involve a part of them);
 *   - nothing waits beyond timeout_s; a dead peer ends a wait within a fraction of a second;
 *   - after DC_SHM_PEER_LOST, DC_SHM_TIMEOUT or DC_SHM_ABORTED the group is unusable and every call repeats the fault.
 */
#ifndef DETCOMM_SHM_H
#define DETCOMM_SHM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Most ranks of one group, and bytes of a call's digest and of the text that explains a difference. */
#define DC_SHM_MAX_RANKS 512
#define DC_SHM_DIGEST_BYTES 32
#define DC_SHM_TEXT_BYTES 2048

typedef enum dc_shm_status {
  DC_SHM_OK = 0,
  DC_SHM_MISMATCH = 1,  /* the digests of this call differ; nothing was written, the group stays in step */
  DC_SHM_PEER_LOST = 2, /* a peer died, closed its group, or broke the protocol */
  DC_SHM_TIMEOUT = 3,   /* peers did not come in time */
  DC_SHM_ABORTED = 4,   /* dc_shm_abort was called, here or on the rank that reports */
  DC_SHM_USAGE = 5,     /* an argument is wrong; nothing was sent */
} dc_shm_status;

/* What broke a group: which status, the rank that saw it first, and the ranks it blames. */
typedef struct dc_shm_fault {
  int32_t status;
  int32_t reporter;
  int32_t num_culprits;
  int32_t culprits[DC_SHM_MAX_RANKS];
  char text[DC_SHM_TEXT_BYTES]; /* the reason given to dc_shm_abort, or what was broken; may be empty */
} dc_shm_fault;

/* Speed only: no value here changes a bit. Must be equal on all ranks. */
typedef struct dc_shm_tuning {
  uint64_t chunk_bytes;    /* bytes that a rank stages at a time; a multiple of 64 */
  uint64_t oneshot_bytes;  /* up to this size every rank folds the whole message itself */
  uint64_t mailbox_bytes;  /* bytes of one slot of a mailbox of dc_shm_exchange; a multiple of 64 */
  int64_t spin_ns;         /* how long a wait spins first */
  int64_t yield_ns;        /* how long it then offers its core to others, again and again, before it sleeps */
  int64_t slice_ns;        /* a yield that takes longer was dear: for a while then, waits sleep without any */
} dc_shm_tuning;

typedef enum dc_shm_collective {
  DC_SHM_ALL_REDUCE = 0,
  DC_SHM_REDUCE_SCATTER = 1,
  DC_SHM_ALL_GATHER = 2,
  DC_SHM_REDUCE = 3,
} dc_shm_collective;

/* One collective. dtype, op, accumulate and shape take the values of detcomm.h. */
typedef struct dc_shm_call {
  uint8_t digest[DC_SHM_DIGEST_BYTES]; /* equal on all ranks exactly if everything that they must agree on is */
  int32_t collective;
  int32_t dtype;
  int32_t op;
  int32_t accumulate;
  int32_t shape;            /* order inside a fold of operands in leaf order */
  int32_t premultiply;      /* nonzero: each rank multiplies its operand by its own factor first */
  int32_t root;             /* the receiving rank of a reduce */
  int32_t item_bytes;       /* bytes of one element of dtype */
  uint64_t ring_chunk_elems; /* 0, or: element i belongs to class (i / ring_chunk_elems) % world size, whose leaf order
                                starts after the rank of that number; in reduce-scatter the class is the receiver */
  uint64_t count;           /* elements of the whole message */
  const uint64_t *shards;   /* world_size + 1 borders in elements, for reduce-scatter and all-gather; else NULL */
} dc_shm_call;

/* A part of an exchange: bytes to or from a peer. */
typedef struct dc_shm_parcel {
  int32_t peer;
  void *data;
  uint64_t num_bytes;
} dc_shm_parcel;

typedef struct dc_shm_group dc_shm_group;

/* Bytes of one rank's segment. The segment must start on a page and be zero. */
uint64_t dc_shm_segment_bytes(int32_t world_size, const dc_shm_tuning *tuning);

/*
 * Joins rank `rank` to its peers. segments[r] is where rank r's segment is mapped here. pidfds[r] is a descriptor that
 * polls readable when the process of rank r has ended, or -1 not to look (threads of one process). heaps[r] is
 * where the shared allocations of rank r are mapped here, heap_bytes[r] long, or NULL; large messages that lie there on
 * every rank are not staged. NULL if an argument is out of range.
 */
dc_shm_group *dc_shm_open(int32_t rank, int32_t world_size, void *const *segments, const int32_t *pidfds,
                          void *const *heaps, const uint64_t *heap_bytes, const dc_shm_tuning *tuning);

/* Frees the group and tells the peers that this rank has left; unmaps and closes nothing. */
void dc_shm_close(dc_shm_group *group);

/*
 * Runs one collective. `output` may be `input`, or in a collective with shards this rank's shard in the larger one.
 * Returns DC_SHM_MISMATCH on every rank, with nothing written, if the digests differ.
 */
int32_t dc_shm_run(dc_shm_group *group, const dc_shm_call *call, const void *input, void *output, double factor,
                   double timeout_s);

/* Returns DC_SHM_OK when every rank has called with an equal digest, DC_SHM_MISMATCH on every rank otherwise. */
int32_t dc_shm_agree(dc_shm_group *group, const uint8_t *digest, double timeout_s);

/*
 * Gathers DC_SHM_TEXT_BYTES from each rank on every rank: `all` holds world_size of them, in rank order. For after a
 * DC_SHM_MISMATCH, to say what each rank wanted: all ranks have seen it, so all of them come here.
 */
int32_t dc_shm_gather_texts(dc_shm_group *group, const char *mine, char *all, double timeout_s);

/* Moves everything given, together; messages between two ranks match in the order in which they were posted. */
int32_t dc_shm_exchange(dc_shm_group *group, const dc_shm_parcel *sends, int32_t num_sends,
                        const dc_shm_parcel *recvs, int32_t num_recvs, double timeout_s);

/* Ends a running call of another thread with DC_SHM_ABORTED soon, here and on all ranks. */
void dc_shm_abort(dc_shm_group *group, const char *reason);

/* What broke the group; status is DC_SHM_OK if nothing did. */
void dc_shm_get_fault(const dc_shm_group *group, dc_shm_fault *fault);

#ifdef __cplusplus
}
#endif
#endif
