// Plans as `fusedcomm.run.native_plan` makes them.
#include "plan_bindings.h"

#include <pybind11/functional.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <memory>
#include <tuple>

#include "norm.h"
#include "plan.h"

namespace fusedcomm {
namespace {

namespace py = pybind11;
using Places = std::vector<Place>;

using Facts = std::pair<std::string, size_t>;  // of a step of any kind: lane, stream

void append(Plan& plan, const Facts& facts, Step step) {
  step.stream = facts.second;
  plan.append(std::move(step), facts.first);
}

Step step_of(Step::Kind kind, Places places = {}) { return Step{kind, std::move(places)}; }

void multiply(Plan& plan, const Facts& facts, Places places, bool has_bias, bool adds) {
  Step step = step_of(Step::kMultiply, std::move(places));
  step.has_bias = has_bias;
  step.adds = adds;
  append(plan, facts, std::move(step));
}

void multiply_with_scales(Plan& plan, const Facts& facts, Places places, bool has_bias, bool adds, bool by_torch, bool fast) {
  Step step = step_of(Step::kMultiply, std::move(places));
  step.has_bias = has_bias;
  step.scaled = ScaledProduct{adds, by_torch, fast};
  append(plan, facts, std::move(step));
}

void reduce(Plan& plan, const Facts& facts, Places places, bool has_bias, bool averages) {
  Step step = step_of(Step::kReduce, std::move(places));
  step.has_bias = has_bias;
  step.averages = averages;
  append(plan, facts, std::move(step));
}

void norm(Plan& plan, const Facts& facts, Places places, bool has_weight, double eps) {
  Step step = step_of(Step::kNorm, std::move(places));
  step.has_bias = has_weight;
  step.eps = eps;
  append(plan, facts, std::move(step));
}

// Signal and Wait, of a rank; Record and Await, of an event; EndRound.
void with_number(Plan& plan, const Facts& facts, int kind, int64_t number) {
  Step step = step_of(static_cast<Step::Kind>(kind));
  step.rank = step.event = number;
  append(plan, facts, std::move(step));
}

// (at, place, (dtype, swizzle, fill, is_small), sizes, strides, box) of each tensor map
using GivenMap = std::tuple<int64_t, size_t, std::array<int, 4>, std::vector<uint64_t>, std::vector<uint64_t>, std::vector<uint32_t>>;

void launch(Plan& plan, const Facts& facts, Places places, uintptr_t function, std::array<uint32_t, 3> grid,
            const std::vector<std::pair<int, std::vector<uint32_t>>>& attributes, const py::bytes& parameters,
            const std::vector<int64_t>& offsets, const std::vector<std::pair<int64_t, size_t>>& addresses,
            const std::vector<GivenMap>& maps) {
  std::vector<LaunchAttribute> given;
  for (const auto& [id, values] : attributes) {
    std::copy(values.begin(), values.end(), given.emplace_back(LaunchAttribute{id, 0, {}}).value);
  }
  std::vector<KernelLaunch::Address> patched;
  for (const auto& [at, place] : addresses) patched.push_back({at, place});
  std::vector<KernelLaunch::Described> described;
  for (const auto& [at, place, how, sizes, strides, box] : maps) {
    const auto [dtype, swizzle, fill, is_small] = how;
    described.push_back({at, place, {dtype, swizzle, fill, is_small != 0, sizes, strides, box}});
  }
  Step step = step_of(Step::kLaunch, std::move(places));
  const auto [num_blocks, num_threads, shared_bytes] = grid;
  step.launch = std::make_shared<KernelLaunch>(function, num_blocks, num_threads, shared_bytes, std::move(given), parameters,
                                               offsets, std::move(patched), std::move(described));
  append(plan, facts, std::move(step));
}

std::shared_ptr<Plan> make_plan(c10::Device device, std::vector<c10::Stream> streams, std::shared_ptr<LaunchOrder> order,
                                const std::vector<std::pair<std::vector<int64_t>, at::ScalarType>>& results,
                                int64_t temporary_bytes, std::vector<int64_t> temporaries, int64_t num_events) {
  std::vector<Result> made;
  for (const auto& [shape, dtype] : results) made.push_back({shape, dtype});
  return std::make_shared<Plan>(PlanDevice{device, std::move(streams), std::move(order)}, std::move(made),
                                temporary_bytes, std::move(temporaries), num_events);
}

}  // namespace

void bind_plans(py::module_& m) {
  py::class_<Place>(m, "Place", "A tensor, by where it lies.")
      .def(py::init([](int base, int64_t index, int64_t offset, std::vector<int64_t> sizes, std::vector<int64_t> strides,
                       at::ScalarType dtype) {
        return Place{static_cast<Place::Base>(base), index, offset, std::move(sizes), std::move(strides), dtype, {}};
      }));

  py::class_<LaunchOrder, std::shared_ptr<LaunchOrder>>(m, "LaunchOrder", "The order of a device's waiting kernels.")
      .def(py::init<>())
      .def("acquire", [](LaunchOrder& order) { order.mutex().lock(); }, py::call_guard<py::gil_scoped_release>())
      .def("release", [](LaunchOrder& order) { order.mutex().unlock(); })
      .def("begin", &LaunchOrder::begin)
      .def("end", &LaunchOrder::end);

  py::class_<Plan, std::shared_ptr<Plan>>(m, "Plan", "A schedule that runs without Python.")
      .def(py::init(&make_plan))
      .def("multiply", &multiply)
      .def("scaled_multiply", &multiply_with_scales)
      .def("copy", [](Plan& plan, const Facts& facts, Places places) { append(plan, facts, step_of(Step::kCopy, std::move(places))); })
      .def("reduce", &reduce)
      .def("norm", &norm)
      .def("with_number", &with_number)
      .def("launch", &launch)
      .def("finish", &Plan::finish)
      .def("run", [](Plan& plan, const std::vector<at::Tensor>& inputs, const Segments& segments, uintptr_t epoch,
                     int64_t fingerprint, Rounds::Wait wait, Rounds::Failed failed) {
        Rounds rounds(segments, reinterpret_cast<int64_t*>(epoch), fingerprint, std::move(wait), std::move(failed));
        return plan.run(inputs, rounds);
      });
  m.def("rms_norm", [](at::Tensor out, const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
    const at::Tensor given = weight ? weight->contiguous() : at::Tensor();
    rms_norm(out, x, weight ? &given : nullptr, eps);
  });
  m.attr("SIGNAL") = static_cast<int>(Step::kSignal);
  m.attr("WAIT") = static_cast<int>(Step::kWait);
  m.attr("END_ROUND") = static_cast<int>(Step::kEndRound);
  m.attr("RECORD") = static_cast<int>(Step::kRecord);
  m.attr("AWAIT") = static_cast<int>(Step::kAwait);
}

}  // namespace fusedcomm
