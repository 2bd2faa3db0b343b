// Plans as `fusedcomm.run.native_plan` makes them.
#include "plan_bindings.h"

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

// One step in the making: the facts that all kinds have, in the order of the tuple that Python gives.
struct Facts {
  std::string lane;
  int64_t stream;
  std::array<int64_t, 3> when;  // test, rank, answer

  explicit Facts(const std::tuple<std::string, int64_t, std::array<int64_t, 3>>& facts)
      : lane(std::get<0>(facts)), stream(std::get<1>(facts)), when(std::get<2>(facts)) {}
};
using GivenFacts = std::tuple<std::string, int64_t, std::array<int64_t, 3>>;

void append(Plan& plan, const GivenFacts& given, Step step) {
  const Facts facts(given);
  step.stream = static_cast<size_t>(facts.stream);
  plan.append(std::move(step), facts.lane, facts.when[0], facts.when[1], facts.when[2]);
}

Step step_of(Step::Kind kind, Places places = {}) { return Step{kind, std::move(places)}; }

void multiply(Plan& plan, const GivenFacts& facts, Places places, bool has_bias, bool adds) {
  Step step = step_of(Step::kMultiply, std::move(places));
  step.has_bias = has_bias;
  step.adds = adds;
  append(plan, facts, std::move(step));
}

void multiply_with_scales(Plan& plan, const GivenFacts& facts, Places places, bool has_bias, bool adds, bool by_torch, bool fast) {
  Step step = step_of(Step::kMultiply, std::move(places));
  step.has_bias = has_bias;
  step.scaled = ScaledProduct{adds, by_torch, fast};
  append(plan, facts, std::move(step));
}

void reduce(Plan& plan, const GivenFacts& facts, Places places, bool has_bias, bool averages) {
  Step step = step_of(Step::kReduce, std::move(places));
  step.has_bias = has_bias;
  step.averages = averages;
  append(plan, facts, std::move(step));
}

void norm(Plan& plan, const GivenFacts& facts, Places places, bool has_weight, double eps) {
  Step step = step_of(Step::kNorm, std::move(places));
  step.has_bias = has_weight;
  step.eps = eps;
  append(plan, facts, std::move(step));
}

// Signal, Wait and Mark, of a rank; Record and Await, of an event; EndRound.
void with_number(Plan& plan, const GivenFacts& facts, int kind, int64_t number) {
  Step step = step_of(static_cast<Step::Kind>(kind));
  step.rank = step.event = number;
  append(plan, facts, std::move(step));
}

void post(Plan& plan, const GivenFacts& facts, Places places, std::vector<int64_t> layouts) {
  Step step = step_of(Step::kPost, std::move(places));
  step.layouts = std::move(layouts);
  append(plan, facts, std::move(step));
}

void ask(Plan& plan, const GivenFacts& facts, int test, int64_t rank, int64_t num_bytes, int64_t layout) {
  Step step = step_of(Step::kAsk);
  step.test = static_cast<Step::Test>(test);
  step.rank = rank;
  step.num_bytes = num_bytes;
  step.layouts = {layout};
  append(plan, facts, std::move(step));
}

// (at, place, (dtype, swizzle, fill, is_small), sizes, strides, box) of each tensor map
using GivenMap = std::tuple<int64_t, size_t, std::array<int, 4>, std::vector<uint64_t>, std::vector<uint64_t>, std::vector<uint32_t>>;

void launch(Plan& plan, const GivenFacts& given_facts, Places places, uintptr_t function, std::array<uint32_t, 3> grid,
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
  for (const auto& [at, place, facts, sizes, strides, box] : maps) {
    const auto [dtype, swizzle, fill, is_small] = facts;
    described.push_back({at, place, {dtype, swizzle, fill, is_small != 0, sizes, strides, box}});
  }
  Step step = step_of(Step::kLaunch, std::move(places));
  const auto [num_blocks, num_threads, shared_bytes] = grid;
  step.launch = std::make_shared<KernelLaunch>(function, num_blocks, num_threads, shared_bytes, std::move(given), parameters,
                                               offsets, std::move(patched), std::move(described));
  append(plan, given_facts, std::move(step));
}

std::shared_ptr<Plan> make_plan(int64_t group_size, c10::Device device, std::vector<c10::Stream> streams,
                                std::shared_ptr<LaunchOrder> order,
                                const std::vector<std::tuple<std::vector<int64_t>, at::ScalarType, bool>>& results,
                                int64_t temporary_bytes, std::vector<int64_t> temporaries, int64_t num_events) {
  std::vector<Result> made;
  for (const auto& [shape, dtype, posted] : results) made.push_back({shape, dtype, posted});
  return std::make_shared<Plan>(group_size, PlanDevice{device, std::move(streams), std::move(order)}, std::move(made),
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
      .def("copy", [](Plan& plan, const GivenFacts& facts, Places places) { append(plan, facts, step_of(Step::kCopy, std::move(places))); })
      .def("reduce", &reduce)
      .def("norm", &norm)
      .def("post", &post)
      .def("ask", &ask)
      .def("with_number", &with_number)
      .def("launch", &launch)
      .def("finish", &Plan::finish)
      .def("__len__", &Plan::num_steps);
  m.def("rms_norm", [](at::Tensor out, const at::Tensor& x, const std::optional<at::Tensor>& weight, double eps) {
    const at::Tensor given = weight ? weight->contiguous() : at::Tensor();
    rms_norm(out, x, weight ? &given : nullptr, eps);
  });
  m.attr("SIGNAL") = static_cast<int>(Step::kSignal);
  m.attr("WAIT") = static_cast<int>(Step::kWait);
  m.attr("MARK") = static_cast<int>(Step::kMark);
  m.attr("END_ROUND") = static_cast<int>(Step::kEndRound);
  m.attr("RECORD") = static_cast<int>(Step::kRecord);
  m.attr("AWAIT") = static_cast<int>(Step::kAwait);
}

}  // namespace fusedcomm
