// SPDX-License-Identifier: Apache-2.0
// A program, operation by operation, handed to CUDA and NCCL.
#include "detcomm_cuda.h"
#include "peer_parameters.h"

namespace {

constexpr unsigned kThreads = 256;
constexpr int kBytes = 1;  // ncclUint8: a message is bytes, whatever it holds

struct Copies {
  const void* src[DC_CUDA_MAX_COPIES];
  void* dst[DC_CUDA_MAX_COPIES];
  uint64_t num_bytes[DC_CUDA_MAX_COPIES];
};

constexpr unsigned kSyncThreads = 32;

class Issue {
 public:
  Issue(const dc_cuda_program& program, const dc_cuda_functions& functions, const dc_cuda_call& call,
        dc_cuda_failure* failure)
      : program_(program), functions_(functions), call_(call), failure_(failure) {}

  bool all() {
    failure_->op = program_.num_ops;
    if (!begin()) return false;
    for (uint64_t i = 0; i < program_.num_ops; ++i) {
      failure_->op = i;
      if (!one(program_.ops[i])) return false;
    }
    failure_->op = program_.num_ops;
    return call_.done == nullptr || check(functions_.cuEventRecord(call_.done, call_.streams[0]), "cuEventRecord");
  }

 private:
  bool check(int code, const char* function) {
    if (code == 0) return true;
    failure_->function = function;
    failure_->code = code;
    return false;
  }

  bool begin() {
    if (!check(functions_.cuCtxSetCurrent(call_.context), "cuCtxSetCurrent")) return false;
    if (call_.begin != nullptr) {
      if (!check(functions_.cuEventRecord(call_.begin, call_.caller), "cuEventRecord")) return false;
      if (!wait(call_.streams[0], call_.begin)) return false;
    }
    return call_.after == nullptr || wait(call_.streams[0], call_.after);
  }

  bool wait(void* stream, void* event) {
    return check(functions_.cuStreamWaitEvent(stream, event, 0), "cuStreamWaitEvent");
  }

  bool one(const dc_cuda_op& op) {
    void* stream = call_.streams[op.stream];
    switch (op.kind) {
      case DC_CUDA_FOLD: return fold(op, stream);
      case DC_CUDA_COPY: return copy(op, stream);
      case DC_CUDA_EXCHANGE: return exchange(op, stream);
      case DC_CUDA_GATHER: return gather(op, stream);
      case DC_CUDA_SYNC: return sync(op, stream);
      case DC_CUDA_PEER_FOLD: return peer_fold(op, stream);
      case DC_CUDA_PEER_COPY: return peer_copy(op, stream);
      case DC_CUDA_PEER_FUSED: return peer_fused(op, stream);
      case DC_CUDA_RECORD: return check(functions_.cuEventRecord(call_.events[op.event], stream), "cuEventRecord");
      case DC_CUDA_WAIT: return wait(stream, call_.events[op.event]);
      default: return check(-1, "dc_cuda_issue: unknown kind of operation");
    }
  }

  const dc_cuda_region& region(const dc_cuda_op& op, uint32_t index) const {
    return program_.regions[op.first_region + index];
  }

  void* address(const dc_cuda_region& region) const { return address_of(call_, region); }

  bool launch(const dc_cuda_op& op, unsigned num_rows, void* stream, void** parameters, unsigned threads = kThreads) {
    return check(functions_.cuLaunchKernel(op.kernel, op.num_blocks, num_rows, 1, threads, 1, 1, 0, stream, parameters,
                                           nullptr),
                 "cuLaunchKernel");
  }

  bool fold(const dc_cuda_op& op, void* stream) {
    if (op.num_regions < 3 || op.num_regions > DC_CUDA_MAX_OPERANDS + 1) return check(-1, "dc_cuda_issue: fold");
    const void* operands[DC_CUDA_MAX_OPERANDS];
    const uint32_t num_inputs = op.num_regions - 1;
    for (uint32_t k = 0; k < num_inputs; ++k) operands[k] = address(region(op, k));
    void* output = address(region(op, num_inputs));
    uint64_t count = op.count;
    uint64_t divisor = op.divisor;
    void* parameters[] = {operands, &output, &count, &divisor};  // the kernel takes as many operands as it folds
    return launch(op, 1, stream, parameters);
  }

  bool copy(const dc_cuda_op& op, void* stream) {
    const uint32_t num_copies = op.num_regions / 2;
    if (num_copies == 0 || num_copies > DC_CUDA_MAX_COPIES) return check(-1, "dc_cuda_issue: copy");
    Copies copies;
    for (uint32_t k = 0; k < num_copies; ++k) {
      copies.src[k] = address(region(op, 2 * k));
      copies.dst[k] = address(region(op, 2 * k + 1));
      copies.num_bytes[k] = region(op, 2 * k).num_bytes;
    }
    void* parameters[] = {&copies};
    return launch(op, num_copies, stream, parameters);
  }

  bool peer_fold(const dc_cuda_op& op, void* stream) {
    if (call_.peers == nullptr || op.num_regions < 3 || op.num_regions > DC_CUDA_MAX_PEER_OPERANDS + 1) {
      return check(-1, "dc_cuda_issue: fold from peers");
    }
    Source operands[DC_CUDA_MAX_PEER_OPERANDS];
    const uint32_t num_inputs = op.num_regions - 1;
    for (uint32_t k = 0; k < num_inputs; ++k) operands[k] = source_of(call_, region(op, k));
    void* output = address(region(op, num_inputs));
    uint64_t count = op.count;
    uint64_t divisor = op.divisor;
    void* parameters[] = {operands, &output, &count, &divisor};
    return launch(op, 1, stream, parameters);
  }

  bool peer_copy(const dc_cuda_op& op, void* stream) {
    const uint32_t num_copies = op.num_regions / 2;
    if (call_.peers == nullptr || num_copies == 0 || num_copies > DC_CUDA_MAX_COPIES) {
      return check(-1, "dc_cuda_issue: copy from peers");
    }
    PeerCopies copies;
    for (uint32_t k = 0; k < num_copies; ++k) {
      copies.src[k] = source_of(call_, region(op, 2 * k));
      copies.dst[k] = address(region(op, 2 * k + 1));
      copies.num_bytes[k] = region(op, 2 * k).num_bytes;
    }
    void* parameters[] = {&copies};
    return launch(op, num_copies, stream, parameters);
  }

  bool sync(const dc_cuda_op& op, void* stream) {
    if (call_.peers == nullptr || op.num_regions == 0 || op.num_regions > DC_CUDA_MAX_PEERS) {
      return check(-1, "dc_cuda_issue: sync");
    }
    Sync sync = sync_of(program_, call_, op);
    void* parameters[] = {&sync};
    return launch(op, 1, stream, parameters, kSyncThreads);
  }

  bool peer_fused(const dc_cuda_op& op, void* stream) {
    if (call_.peers == nullptr || num_rows_of(op) > kMostRows) return check(-1, "dc_cuda_issue: fused call");
    Fused fused = fused_of(program_, call_, op);
    void* parameters[] = {&fused};
    return launch(op, 1, stream, parameters);
  }

  bool exchange(const dc_cuda_op& op, void* stream) {
    if (!check(functions_.ncclGroupStart(), "ncclGroupStart")) return false;
    const bool posted = post(op, stream);
    const int code = functions_.ncclGroupEnd();  // also after a failure: an open group would swallow later calls
    return posted && check(code, "ncclGroupEnd");
  }

  bool post(const dc_cuda_op& op, void* stream) {
    for (uint32_t k = 0; k < op.num_regions; ++k) {
      const dc_cuda_region& part = region(op, k);
      void* data = address(part);
      if (k < op.num_sends) {
        const int code = functions_.ncclSend(data, part.num_bytes, kBytes, part.peer, call_.comm, stream);
        if (!check(code, "ncclSend")) return false;
      } else {
        const int code = functions_.ncclRecv(data, part.num_bytes, kBytes, part.peer, call_.comm, stream);
        if (!check(code, "ncclRecv")) return false;
      }
    }
    return true;
  }

  bool gather(const dc_cuda_op& op, void* stream) {
    if (op.num_regions != 2) return check(-1, "dc_cuda_issue: gather");
    const dc_cuda_region& own = region(op, 0);
    const int code = functions_.ncclAllGather(address(own), address(region(op, 1)), own.num_bytes, kBytes, call_.comm,
                                              stream);
    return check(code, "ncclAllGather");
  }

  const dc_cuda_program& program_;
  const dc_cuda_functions& functions_;
  const dc_cuda_call& call_;
  dc_cuda_failure* failure_;
};

}  // namespace

extern "C" {

int dc_cuda_issue(const dc_cuda_program* program, const dc_cuda_functions* functions, const dc_cuda_call* call,
                  dc_cuda_failure* failure) {
  return Issue(*program, *functions, *call, failure).all() ? 0 : -1;
}

uint32_t dc_cuda_abi_version(void) { return DC_CUDA_ABI_VERSION; }

}  // extern "C"
