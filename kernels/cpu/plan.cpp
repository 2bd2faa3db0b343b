#include "plan.h"

#include <ATen/ops/add.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "gil.h"
#include "norm.h"

namespace fusedcomm {
namespace {

constexpr int64_t kBlock = 1 << 16;  // elements of a sum that a core's caches hold

// The place as a tensor of its own on a storage: `as_strided` without the dispatcher.
at::Tensor view(const c10::Storage& storage, const Place& place, int64_t start) {
  const auto key = storage.device_type() == c10::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key),
                                                       c10::scalarTypeToTypeMeta(place.dtype));
  const auto itemsize = static_cast<int64_t>(c10::elementSize(place.dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(place.sizes, place.strides, start / itemsize);
  return made;
}

// out = x @ w + added, 2-D or 3-D.
void multiply(at::Tensor& out, const at::Tensor& x, const at::Tensor& w, const at::Tensor* added) {
  if (out.dim() == 3) {
    added == nullptr ? at::bmm_out(out, x, w) : at::baddbmm_out(out, *added, x, w);
  } else {
    added == nullptr ? at::mm_out(out, x, w) : at::addmm_out(out, *added, x, w);
  }
}

// As fusedcomm.run.add_in_order.
void add_in_order(at::Tensor& out, const std::vector<at::Tensor>& parts, const at::Tensor* bias, bool averages) {
  const bool plain = bias == nullptr && !averages;
  if (plain && parts.size() == 1) {
    out.copy_(parts[0]);
    return;
  }
  if (plain && parts.size() == 2) {  // rounded once as well, because torch adds in float32
    at::add_out(out, parts[0], parts[1]);
    return;
  }
  const int64_t row = bias == nullptr ? 1 : std::max<int64_t>(bias->numel(), 1);
  const int64_t step = std::max<int64_t>(kBlock / row, 1) * row;
  for (int64_t start = 0; start < out.numel(); start += step) {
    const int64_t length = std::min(step, out.numel() - start);
    at::Tensor total = parts[0].narrow(0, start, length).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    for (size_t i = 1; i < parts.size(); ++i) total.add_(parts[i].narrow(0, start, length));
    if (averages) total.div_(static_cast<double>(parts.size()));
    if (bias != nullptr) total = total.view({-1, row}).add(*bias).view({-1});
    out.narrow(0, start, length).copy_(total);
  }
}

bool is_one_run(const Place& place) {
  int64_t step = 1;
  for (size_t i = place.sizes.size(); i-- > 0;) {
    if (place.sizes[i] != 1 && place.strides[i] != step) return false;
    step *= place.sizes[i];
  }
  return true;
}

}  // namespace

class Plan::Run {
 public:
  Run(Plan& plan, const std::vector<at::Tensor>& inputs, Rounds& rounds)
      : plan_(plan), inputs_(inputs), rounds_(rounds) {
    const auto& [device, streams, order] = plan.device_;
    if (!device.is_cpu()) {
      guard_.emplace(device);
      streams_.emplace(device, streams, plan.events_);
    }
    for (const Result& each : plan.results_) {
      results_.push_back(device.is_cpu() ? Rounds::empty(each.shape, each.dtype)
                                         : at::empty(each.shape, at::TensorOptions(device).dtype(each.dtype)));
    }
    if (plan.temporary_bytes_ > 0) {
      temporaries_ = at::empty({plan.temporary_bytes_}, at::TensorOptions(device).dtype(at::kByte));
    }
  }

  // The streams of a GPU are joined, however the steps end.
  void steps() {
    if (!streams_) return in_order();
    LaunchOrder& order = *plan_.device_.order;
    std::unique_lock<std::recursive_mutex> guard(order.mutex(), std::try_to_lock);
    if (!guard.owns_lock()) {  // its owner may wait for the GIL
      const WithoutGil gil;
      guard.lock();
    }
    order.begin(streams_->main());
    try {
      in_order();
    } catch (const std::exception&) {
      streams_->join();
      order.end(streams_->main());
      throw;
    }
    order.end(streams_->main());
  }

  at::Tensor tensor(Place& place) {
    if (place.base == Place::kInput && place.offset == 0) {
      const at::Tensor& base = inputs_[static_cast<size_t>(place.index)];
      if (base.scalar_type() == place.dtype && base.sizes() == place.sizes && base.strides() == place.strides) return base;
    }
    if (place.base == Place::kSlot) return in_slot(place);
    const auto [storage, start] = memory(place);
    return view(*storage, place, start);
  }

  at::Tensor returned(Place& place) {
    const at::Tensor& made = results_[static_cast<size_t>(place.index)];
    return place.base == Place::kResult && place.offset == 0 && made.sizes() == place.sizes ? made : tensor(place);
  }

 private:
  void in_order() {
    for (Step& each : plan_.steps_) {
      if (each.lane != lane_) enter(each.lane);
      (*this)(each);
    }
    range_.reset();
  }

  // The storage that a place is in, and where it begins there, in bytes.
  std::pair<const c10::Storage*, int64_t> memory(const Place& place) const {
    const auto index = static_cast<size_t>(place.index);
    switch (place.base) {
      case Place::kInput: {
        const at::Tensor& base = inputs_[index];
        return {&base.storage(), base.storage_offset() * base.itemsize() + place.offset};
      }
      case Place::kResult:
        return {&results_[index].storage(), place.offset};
      case Place::kTemporary:
        return {&temporaries_.storage(), plan_.temporaries_[index] + place.offset};
      case Place::kSlot:
        return {&rounds_.storage(place.index), rounds_.slot_offset() + place.offset};
      case Place::kSegment:
        return {&rounds_.storage(place.index), place.offset};
    }
    TORCH_CHECK(false, "no base ", static_cast<int>(place.base));
  }

  uintptr_t address(const Place& place) const {
    const auto [storage, start] = memory(place);
    return reinterpret_cast<uintptr_t>(storage->data()) + static_cast<uintptr_t>(start);
  }

  void operator()(Step& step) {
    switch (step.kind) {
      case Step::kMultiply:
        return multiply(step);
      case Step::kCopy:
        return copy(step);
      case Step::kLaunch:
        return (*step.launch)(streams_->handle(step.stream), [&](size_t place) { return address(step.places[place]); });
      case Step::kRecord:
        return streams_->record(step.stream, step.event);
      case Step::kAwait:
        return streams_->await(step.stream, step.event);
      case Step::kReduce:
        return reduce(step);
      case Step::kNorm:
        return norm(step);
      case Step::kSignal:
        return signal(step);
      case Step::kWait:
        return rounds_.wait(step.rank);
      case Step::kEndRound:
        return streams_ ? rounds_.count() : rounds_.end();
    }
  }

  void copy(Step& step) {
    const Place &to = step.places[0], &source = step.places[1];
    if (!streams_) {
      tensor(step.places[0]).copy_(tensor(step.places[1]));
    } else if (step.is_one_run) {
      const size_t num_bytes = c10::multiply_integers(to.sizes) * c10::elementSize(to.dtype);
      Driver::get().copy(address(to), address(source), num_bytes, streams_->handle(step.stream));
    } else {
      streams_->use(step.stream);
      tensor(step.places[0]).copy_(tensor(step.places[1]), /*non_blocking=*/true);
    }
  }

  void signal(const Step& step) {
    if (!streams_) return rounds_.signal(step.rank);
    const auto [address, value] = rounds_.signal_to(step.rank);
    Driver::get().write(streams_->handle(step.stream), address, value);
  }

  void multiply(Step& step) {
    if (streams_) streams_->use(step.stream);
    at::Tensor out = tensor(step.places[0]);
    const at::Tensor x = tensor(step.places[1]), w = tensor(step.places[2]);
    if (step.scaled) {
      const std::optional<at::Tensor> bias = step.has_bias ? std::optional(tensor(step.places[5])) : std::nullopt;
      return scaled_multiply(out, x, w, tensor(step.places[3]), tensor(step.places[4]), bias, *step.scaled);
    }
    const at::Tensor bias = step.has_bias ? tensor(step.places[3]) : at::Tensor();
    const at::Tensor* added = step.adds ? &out : step.has_bias ? &bias : nullptr;
    fusedcomm::multiply(out, x, w, added);
  }

  void reduce(Step& step) {
    std::vector<at::Tensor> tensors;
    tensors.reserve(step.places.size());
    for (Place& each : step.places) tensors.push_back(tensor(each));
    at::Tensor out = tensors.front(), bias;
    if (step.has_bias) {
      bias = std::move(tensors.back());
      tensors.pop_back();
    }
    tensors.erase(tensors.begin());
    add_in_order(out, tensors, step.has_bias ? &bias : nullptr, step.averages);
  }

  void norm(Step& step) {
    at::Tensor out = tensor(step.places[0]);
    const at::Tensor x = tensor(step.places[1]), weight = step.has_bias ? tensor(step.places[2]) : at::Tensor();
    rms_norm(out, x, step.has_bias ? &weight : nullptr, step.eps);
  }

  at::Tensor in_slot(Place& place) {
    at::Tensor& cached = place.in_slots[static_cast<size_t>(rounds_.slot())];
    if (!cached.defined()) {
      c10::InferenceMode guard(false);  // it is written in later calls too, whatever their mode
      cached = view(rounds_.storage(place.index), place, rounds_.slot_offset() + place.offset);
    }
    return cached;
  }

  void enter(size_t lane) {
    range_.reset();
    lane_ = lane;
    if (lane == 0) return;
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      range_.emplace(std::move(*callbacks));
      range_->before(plan_.lanes_[lane]);
    }
  }

  Plan& plan_;
  const std::vector<at::Tensor>& inputs_;
  Rounds& rounds_;
  std::vector<at::Tensor> results_;
  at::Tensor temporaries_;
  std::optional<c10::DeviceGuard> guard_;
  std::optional<Streams> streams_;  // of a GPU
  size_t lane_ = 0;
  std::optional<at::RecordFunction> range_;  // where somebody profiles
};

void Plan::append(Step step, const std::string& lane) {
  const auto found = std::find(lanes_.begin(), lanes_.end(), lane);
  step.lane = static_cast<size_t>(found - lanes_.begin());
  if (found == lanes_.end()) lanes_.push_back(lane);
  step.is_one_run = step.kind == Step::kCopy && step.places[0].dtype == step.places[1].dtype &&
                    is_one_run(step.places[0]) && is_one_run(step.places[1]);
  steps_.push_back(std::move(step));
}

std::vector<at::Tensor> Plan::run(const std::vector<at::Tensor>& inputs, Rounds& rounds) {
  Run run(*this, inputs, rounds);
  run.steps();
  std::vector<at::Tensor> found;
  found.reserve(returned_.size());
  for (Place& each : returned_) found.push_back(run.returned(each));
  return found;
}

}  // namespace fusedcomm
