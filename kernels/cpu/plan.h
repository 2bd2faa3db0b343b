// A schedule (fusedcomm/plan/schedule.py) bound to a device: steps that run without Python.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernel_launch.h"
#include "rounds.h"
#include "scaled_multiply.h"
#include "streams.h"

namespace fusedcomm {

// A tensor by where it lies.
struct Place {
  enum Base { kInput, kResult, kTemporary, kSlot, kSegment };

  Base base;
  int64_t index;   // of an input, result or temporary, or the rank that owns the memory
  int64_t offset;  // bytes
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
  std::array<at::Tensor, kNumSlots> in_slots;  // for kSlot: views that are made once
};

struct Step {
  enum Kind { kMultiply, kCopy, kReduce, kNorm, kSignal, kWait, kEndRound, kLaunch, kRecord, kAwait };

  Kind kind;
  std::vector<Place> places;  // the one that is written first
  int64_t rank = 0;
  bool has_bias = false;   // the last of the places; for kNorm the weight
  double eps = 0;          // for kNorm
  bool adds = false;       // for kMultiply: to what is there
  std::optional<ScaledProduct> scaled;  // for kMultiply: places 3 and 4 are scales of x and w
  bool averages = false;   // for kReduce: the sum is divided by the number of parts
  size_t lane = 0;
  size_t stream = 0;
  bool is_one_run = false;  // for kCopy: both places are, of one dtype
  int64_t event = 0;
  std::shared_ptr<KernelLaunch> launch;
};

struct Result {
  std::vector<int64_t> shape;
  at::ScalarType dtype;
};

// The device of a plan, and on a GPU its streams beside the caller's, and the order that its launches are in.
struct PlanDevice {
  c10::Device device{c10::kCPU};
  std::vector<c10::Stream> streams;
  std::shared_ptr<LaunchOrder> order;
};

class Plan {
 public:
  Plan(PlanDevice device, std::vector<Result> results, int64_t temporary_bytes, std::vector<int64_t> temporaries,
       int64_t num_events)
      : device_(std::move(device)), results_(std::move(results)), temporary_bytes_(temporary_bytes),
        temporaries_(std::move(temporaries)), events_(static_cast<size_t>(num_events)) {}

  void append(Step step, const std::string& lane);
  void finish(std::vector<Place> returned) { returned_ = std::move(returned); }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs, Rounds& rounds);

 private:
  class Run;

  PlanDevice device_;
  std::vector<Step> steps_;
  std::vector<Result> results_;
  int64_t temporary_bytes_;
  std::vector<int64_t> temporaries_;  // by index: where each begins in the one block of temporary_bytes_
  std::vector<Event> events_;  // recorded anew by each run
  std::vector<Place> returned_;
  std::vector<std::string> lanes_{""};
};

}  // namespace fusedcomm
