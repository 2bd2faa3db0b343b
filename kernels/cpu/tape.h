// What a call did, so that it can be done again on other tensors without Python: ops of torch on named parts of memory,
// signals and waits. `fusedcomm.ops.prepared` records a tape while an algorithm written in Python runs.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "rounds.h"

namespace fusedcomm {

// A tensor, by where it lies.
struct Operand {
  enum Base { kArgument, kRegister, kSlot, kPeerResult };

  Base base;
  int64_t index;        // among the tensors of the call, or the registers; or the rank that owns the slot or the result
  int64_t byte_offset;  // from the begin of a register's storage, of the slot or result, or from an argument's first element
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  at::ScalarType dtype;
  std::array<at::Tensor, kNumSlots> in_slots;  // for kSlot: views that are made once
};

using Operands = std::vector<std::optional<Operand>>;

struct Instruction {
  enum Kind {
    kOp,
    kResult,    // memory for a result of the call
    kPost,      // tell the peers where it is
    kChunks,    // the bodies of the chunks that are sent in a round, by dst_rank
    kPlaced,    // bodies[0] if this rank may write dst_rank's result, else bodies[1], which writes its slot
    kArrived,   // bodies[0] if src_rank has written the own result, else bodies[1], which reads the slot
    kSignal,
    kWait,
    kEndRound,
    kEnterLane,
    kLeaveLane
  };
  using Argument = std::variant<c10::IValue, Operand, Operands>;

  Kind kind;
  std::optional<c10::OperatorHandle> op;
  std::vector<Argument> arguments;
  std::vector<int64_t> made;       // the register of each result of an op, lists flattened; -1: it is not new memory
  std::vector<int64_t> last_used;  // registers that nothing behind it reads
  int64_t rank = 0;                // for kPlaced, kArrived, kSignal, kWait
  int64_t num_bytes = 0;           // for kPlaced: the size of the result
  std::vector<int64_t> ranks;      // for kChunks
  std::vector<std::vector<Instruction>> bodies;
  std::string lane;
  std::vector<int64_t> sizes;  // for kResult
  at::ScalarType dtype = at::kFloat;
  bool posted = false;
};

class Tape {
 public:
  void append(Instruction instruction) {
    (open_.empty() ? instructions_ : open_.back()).push_back(std::move(instruction));
  }
  // What is appended between the two is a body of the next instruction that takes bodies.
  void begin_body() { open_.emplace_back(); }
  void end_body() {
    closed_.push_back(std::move(open_.back()));
    open_.pop_back();
  }
  void append_with_bodies(Instruction instruction, size_t num_bodies) {
    TORCH_CHECK(closed_.size() >= num_bodies, "there are ", closed_.size(), " bodies, not ", num_bodies);
    const auto first = closed_.end() - static_cast<std::ptrdiff_t>(num_bodies);
    instruction.bodies.assign(std::make_move_iterator(first), std::make_move_iterator(closed_.end()));
    closed_.erase(first, closed_.end());
    append(std::move(instruction));
  }
  int64_t new_register() { return num_registers_++; }

  // The op's results: a tensor or a list of tensors each. Afterwards nothing can be appended.
  void finish(std::vector<std::variant<Operand, Operands>> results);

  size_t num_instructions() const { return instructions_.size(); }

  // `arguments`: the tensors of the call, in the order of the schema. `rounds` is null for a tape without signals.
  std::vector<c10::IValue> run(const std::vector<at::Tensor>& arguments, Rounds* rounds);

 private:
  class Run;

  std::vector<Instruction> instructions_;
  std::vector<std::vector<Instruction>> open_;
  std::vector<std::vector<Instruction>> closed_;
  std::vector<std::variant<Operand, Operands>> results_;
  int64_t num_registers_ = 0;
};

// One run of a tape.
class Tape::Run {
 public:
  Run(Tape& tape, const std::vector<at::Tensor>& arguments, Rounds* rounds)
      : arguments_(arguments), rounds_(rounds), registers_(static_cast<size_t>(tape.num_registers_)) {}

  void operator()(Instruction& each) {
    switch (each.kind) {
      case Instruction::kOp:
        call(each);
        break;
      case Instruction::kResult:
        result(each);
        break;
      case Instruction::kPost:
        rounds_->post(tensor(std::get<Operand>(each.arguments[0])));
        break;
      case Instruction::kChunks:
        chunks(each);
        break;
      case Instruction::kPlaced:
        place(each);
        break;
      case Instruction::kArrived:
        run(each.bodies[rounds_->is_in_place(each.rank) ? 0 : 1]);
        break;
      case Instruction::kSignal:
        rounds_->signal(each.rank);
        break;
      case Instruction::kWait:
        rounds_->wait(each.rank);
        break;
      case Instruction::kEndRound:
        rounds_->end();
        break;
      case Instruction::kEnterLane:
        enter(each.lane);
        break;
      case Instruction::kLeaveLane:
        lanes_.pop_back();
        break;
    }
    for (const int64_t index : each.last_used) registers_[static_cast<size_t>(index)].reset();
  }

  void run(std::vector<Instruction>& body) {
    for (auto& each : body) (*this)(each);
  }

  at::Tensor tensor(Operand& operand) {
    if (operand.base == Operand::kSlot) return in_slot(operand);
    if (operand.base == Operand::kPeerResult) {
      const int64_t offset = peer_place_ + operand.byte_offset;
      return view(rounds_->heap(operand.index), operand, offset / static_cast<int64_t>(c10::elementSize(operand.dtype)));
    }
    const at::Tensor& base = operand.base == Operand::kArgument ? arguments_[static_cast<size_t>(operand.index)]
                                                                : registers_[static_cast<size_t>(operand.index)];
    const int64_t start = operand.base == Operand::kArgument ? base.storage_offset() * base.itemsize() : 0;
    const int64_t offset = (start + operand.byte_offset) / static_cast<int64_t>(c10::elementSize(operand.dtype));
    if (base.storage_offset() == offset && base.sizes() == operand.sizes && base.strides() == operand.strides &&
        base.scalar_type() == operand.dtype) {
      return base;
    }
    return view(base.storage(), operand, offset);
  }

  c10::IValue value(std::variant<Operand, Operands>& either) {
    if (auto* one = std::get_if<Operand>(&either)) return tensor(*one);
    return list(std::get<Operands>(either));
  }

  c10::IValue list(Operands& operands) {
    c10::List<at::Tensor> tensors;
    tensors.reserve(operands.size());
    for (auto& each : operands) tensors.push_back(each ? tensor(*each) : at::Tensor());
    return tensors;
  }

 private:
  // The operand as a tensor of its own on a storage: `as_strided` without the dispatcher.
  static at::Tensor view(const c10::Storage& storage, const Operand& operand, int64_t offset) {
    auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                         c10::scalarTypeToTypeMeta(operand.dtype));
    made.unsafeGetTensorImpl()->set_sizes_and_strides(operand.sizes, operand.strides, offset);
    return made;
  }

  at::Tensor in_slot(Operand& operand) {
    at::Tensor& cached = operand.in_slots[rounds_->slot()];
    if (!cached.defined()) {
      c10::InferenceMode guard(false);  // it is written in later calls too, whatever their mode
      const auto itemsize = static_cast<int64_t>(c10::elementSize(operand.dtype));
      cached = view(rounds_->storage(operand.index), operand, (rounds_->slot_offset() + operand.byte_offset) / itemsize);
    }
    return cached;
  }

  void call(Instruction& each) {
    stack_.clear();
    for (auto& argument : each.arguments) {
      if (auto* constant = std::get_if<c10::IValue>(&argument)) {
        stack_.push_back(*constant);
      } else if (auto* one = std::get_if<Operand>(&argument)) {
        stack_.emplace_back(tensor(*one));
      } else {
        stack_.push_back(list(std::get<Operands>(argument)));
      }
    }
    each.op->callBoxed(stack_);
    auto made = each.made.begin();
    const auto keep = [&](at::Tensor t) {
      if (*made >= 0) registers_[static_cast<size_t>(*made)] = std::move(t);
      ++made;
    };
    for (auto& result : stack_) {
      if (result.isTensor()) {
        keep(std::move(result).toTensor());
      } else {
        for (const at::Tensor& t : result.toTensorList()) keep(t);
      }
    }
  }

  void result(const Instruction& each) {
    registers_[static_cast<size_t>(each.made[0])] = rounds_->empty(each.sizes, each.dtype, each.posted);
  }

  // The peers first. Where one is late with its post, the own chunk: then there is another look for it.
  void chunks(Instruction& each) {
    const auto own = std::find(each.ranks.begin(), each.ranks.end(), rounds_->rank());
    const auto body_of = [&](auto rank) -> auto& { return each.bodies[static_cast<size_t>(rank - each.ranks.begin())]; };
    const bool own_first = own != each.ranks.end() && rounds_->is_peer_late();
    if (own_first) run(body_of(own));
    for (auto rank = each.ranks.begin(); rank != each.ranks.end(); ++rank) {
      if (rank != own) run(body_of(rank));
    }
    if (own != each.ranks.end() && !own_first) run(body_of(own));
  }

  void place(Instruction& each) {
    const std::optional<int64_t> found = rounds_->posted(each.rank, each.num_bytes);
    if (!found) return run(each.bodies[1]);
    peer_place_ = *found;
    run(each.bodies[0]);
    rounds_->mark_in_place(each.rank);
  }

  void enter(const std::string& lane) {
    lanes_.emplace_back();
    if (auto callbacks = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE)) {
      lanes_.back() = std::make_unique<at::RecordFunction>(std::move(*callbacks));
      lanes_.back()->before(lane);
    }
  }

  const std::vector<at::Tensor>& arguments_;
  Rounds* rounds_;
  std::vector<at::Tensor> registers_;
  std::vector<std::unique_ptr<at::RecordFunction>> lanes_;  // null where nobody profiles
  std::vector<c10::IValue> stack_;
  int64_t peer_place_ = 0;  // where the peer's result begins in its heap
};

inline std::vector<c10::IValue> Tape::run(const std::vector<at::Tensor>& arguments, Rounds* rounds) {
  Run run(*this, arguments, rounds);
  run.run(instructions_);
  std::vector<c10::IValue> results;
  results.reserve(results_.size());
  for (auto& each : results_) results.push_back(run.value(each));
  return results;
}

// Finds the instruction behind which nothing reads a register. A register that a body reads is kept until the whole
// instruction is over, as chunks change places.
class LastUses {
 public:
  explicit LastUses(int64_t num_registers) : used_(static_cast<size_t>(num_registers), false) {}

  void operator()(std::vector<Instruction>& instructions) {
    for (auto each = instructions.rbegin(); each != instructions.rend(); ++each) visit(*each, each->last_used);
  }

  template <typename Either>
  void use(const Either& either, std::vector<int64_t>& last_used) {
    if (const auto* one = std::get_if<Operand>(&either)) use_one(*one, last_used);
    if (const auto* many = std::get_if<Operands>(&either)) {
      for (const auto& each : *many) {
        if (each) use_one(*each, last_used);
      }
    }
  }

 private:
  void visit(const Instruction& instruction, std::vector<int64_t>& last_used) {
    for (const auto& argument : instruction.arguments) use(argument, last_used);
    for (const auto& body : instruction.bodies) {
      for (const auto& each : body) visit(each, last_used);
    }
  }

  void use_one(const Operand& operand, std::vector<int64_t>& last_used) {
    if (operand.base != Operand::kRegister || used_[static_cast<size_t>(operand.index)]) return;
    used_[static_cast<size_t>(operand.index)] = true;
    last_used.push_back(operand.index);
  }

  std::vector<bool> used_;
};

inline void Tape::finish(std::vector<std::variant<Operand, Operands>> results) {
  results_ = std::move(results);
  LastUses last_uses(num_registers_);
  std::vector<int64_t> kept;
  for (const auto& each : results_) last_uses.use(each, kept);
  last_uses(instructions_);
}

}  // namespace fusedcomm
