// How the ranks of a group find each other's segments through the group's store.
//
// A store may hold keys from earlier attempts, killed processes, or an earlier group of the same name. So every
// attempt of a rank carries a fresh random ticket, and a rank takes part only in an attempt that all ranks confirm:
//
//   offer/<rank>          what the rank offers, its ticket included; between attempts, the time when it gave up the
//                         last one, or 0
//   agreed/<id>/<rank>    the rank has read the offers whose tickets hash to <id>. Its own fresh ticket is one of them,
//                         so what all ranks have set belongs to the present attempt of each
//   mapped/<id>/<rank>    "ok" once the rank has mapped everything, else why it cannot; ends the attempt on all ranks
//   done/<id>             how many ranks have read that; the last one removes it
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bounded_store.h"
#include "gil.h"
#include "group.h"
#include "segment.h"

namespace fusedcomm {

struct Offer {
  SegmentAddress pad;  // made for the attempt: its id is the ticket
  SegmentAddress buffer;
  uint64_t offset;         // where the tensor's storage begins in the buffer
  uint64_t host;           // hash of the boot id
  uint64_t pid_namespace;  // hash of its name
};

inline uint64_t hash_bytes(const void* data, size_t num_bytes) {  // FNV-1a: the same in every process
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < num_bytes; ++i) hash = (hash ^ static_cast<const uint8_t*>(data)[i]) * 0x100000001b3u;
  return hash;
}

inline std::string list_ranks(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  return text;
}

constexpr std::chrono::seconds kDefaultTimeout{300};  // as in env.py
constexpr std::chrono::seconds kStoreGrace{2};  // how long the store may take to answer when the time is over

// One attempt. Each of its two waits is bounded, and the destructor withdraws what it has posted.
class Rendezvous {
 public:
  Rendezvous(const Group& group, WithoutGil& gil);
  Rendezvous(const Rendezvous&) = delete;
  Rendezvous& operator=(const Rendezvous&) = delete;
  ~Rendezvous();

  // Returns every rank's offer of this attempt.
  std::vector<Offer> exchange(const Offer& mine);

  // Ends the attempt once every rank has called this. Returns each rank's error, "ok" for none. A rank that has
  // exchanged offers calls this whatever went wrong since; if it just left, its peers would wait in vain.
  std::vector<std::string> acknowledge(const std::string& error);

 private:
  using Clock = std::chrono::steady_clock;

  std::string key(const char* what) const { return prefix_ + what + "/" + agreement_; }
  std::string offer_key(int rank) const { return prefix_ + "offer/" + std::to_string(rank); }
  std::string agreed_key(int rank) const { return key("agreed") + "/" + std::to_string(rank); }
  std::string mapped_key(int rank) const { return key("mapped") + "/" + std::to_string(rank); }
  std::vector<std::string> all(std::string (Rendezvous::*rank_key)(int) const) const;

  std::vector<Offer> read_offers() const;
  bool has_come(int rank) const;
  void post(const std::string& key, const std::string& value);
  void start_wait();
  bool wait_a_little();
  [[noreturn]] void throw_timeout(const char* what, const std::function<bool(int)>& has_done) const;

  const Group& group_;
  BoundedStore store_;
  WithoutGil& gil_;
  std::string prefix_;
  std::string agreement_;  // hash of the tickets confirmed last
  std::chrono::milliseconds timeout_;
  Clock::time_point deadline_;
  Clock::time_point next_signal_check_ = Clock::now();
  Clock::duration pause_ = std::chrono::microseconds(200);
  int64_t start_ms_;
  std::vector<std::string> posted_;
  bool done_ = false;
};

inline int64_t wall_clock_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

inline Rendezvous::Rendezvous(const Group& group, WithoutGil& gil)
    : group_(group),
      store_(group.store, gil),
      gil_(gil),
      prefix_("fusedcomm/symm_mem/" + group.name + "/"),
      timeout_(kDefaultTimeout),
      start_ms_(wall_clock_ms()) {
  const char* variable = std::getenv("FUSEDCOMM_TIMEOUT_S");
  const double seconds = variable == nullptr ? 0 : std::atof(variable);
  if (seconds > 0) timeout_ = std::chrono::milliseconds(static_cast<int64_t>(std::min(seconds, 1e9) * 1e3));
  start_wait();
}

inline Rendezvous::~Rendezvous() {
  WithoutGil gil;  // an interrupt has taken it back; with this one, none is lost here if it has not
  BoundedStore store(group_.store, gil);
  store.set_deadline(Clock::now() + kStoreGrace);
  try {
    store.set(offer_key(group_.rank), done_ ? std::string("0") : std::to_string(wall_clock_ms()));
    for (const std::string& key : posted_) store.remove(key);
  } catch (...) {  // the store may be gone, or cannot delete; a key that stays is never taken for a fresh one
  }
}

inline std::vector<std::string> Rendezvous::all(std::string (Rendezvous::*rank_key)(int) const) const {
  std::vector<std::string> keys;
  for (int rank = 0; rank < group_.size; ++rank) keys.push_back((this->*rank_key)(rank));
  return keys;
}

inline void Rendezvous::post(const std::string& key, const std::string& value) {
  posted_.push_back(key);
  store_.set(key, value);
}

// All offers, or none while one is missing. The keys are never deleted, so that the read after the check cannot block.
inline std::vector<Offer> Rendezvous::read_offers() const {
  const auto keys = all(&Rendezvous::offer_key);
  if (!store_.check(keys)) return {};
  std::vector<Offer> offers;
  for (const auto& value : store_.get_all(keys)) {
    if (value.size() != sizeof(Offer)) return {};
    std::memcpy(&offers.emplace_back(), value.data(), sizeof(Offer));
  }
  return offers;
}

// Whether the rank has taken part since this attempt began. What a killed process has offered stays, but once all
// offers are there, only a living rank confirms this attempt's.
inline bool Rendezvous::has_come(int rank) const {
  if (!store_.check({offer_key(rank)})) return false;
  const std::string value = store_.get(offer_key(rank));
  if (value.size() != sizeof(Offer)) return std::atoll(value.c_str()) >= start_ms_;
  return agreement_.empty() || store_.check({agreed_key(rank)});
}

inline void Rendezvous::start_wait() {
  deadline_ = Clock::now() + timeout_;
  store_.set_deadline(deadline_ + kStoreGrace);
}

// Returns false once the time is over.
inline bool Rendezvous::wait_a_little() {
  const auto now = Clock::now();
  if (now >= deadline_) return false;
  if (now >= next_signal_check_) {
    gil_.check_signals();
    next_signal_check_ = now + std::chrono::milliseconds(50);
  }
  std::this_thread::sleep_for(std::min<Clock::duration>(pause_, deadline_ - now));
  pause_ = std::min<Clock::duration>(pause_ * 3 / 2, std::chrono::milliseconds(5));
  return true;
}

inline void Rendezvous::throw_timeout(const char* what, const std::function<bool(int)>& has_done) const {
  std::vector<int> missing;
  for (int rank = 0; rank < group_.size; ++rank) {
    if (rank != group_.rank && !has_done(rank)) missing.push_back(rank);
  }
  char seconds[32];
  std::snprintf(seconds, sizeof(seconds), "%g s", std::chrono::duration<double>(timeout_).count());
  const std::string who = missing.empty() ? "some rank" : list_ranks(missing);
  C10_THROW_ERROR(DistStoreError, who + " did not " + what + " within " + seconds);
}

inline std::vector<Offer> Rendezvous::exchange(const Offer& mine) {
  store_.set(offer_key(group_.rank), std::string(reinterpret_cast<const char*>(&mine), sizeof(Offer)));
  std::vector<Offer> offers;
  do {
    const std::vector<Offer> seen = read_offers();
    // This is checked after the read: a rank replaces its offer only when the attempt is agreed, or it has given up.
    if (!offers.empty() && store_.check(all(&Rendezvous::agreed_key))) {
      start_wait();
      return offers;
    }
    if (seen.empty()) continue;
    std::vector<uint64_t> tickets;
    for (const Offer& offer : seen) tickets.push_back(offer.pad.id);
    const std::string agreement = std::to_string(hash_bytes(tickets.data(), tickets.size() * sizeof(uint64_t)));
    if (agreement == agreement_) continue;
    offers = seen;
    agreement_ = agreement;
    post(agreed_key(group_.rank), "1");
  } while (wait_a_little());

  throw_timeout("come", [this](int rank) { return has_come(rank); });
}

inline std::vector<std::string> Rendezvous::acknowledge(const std::string& error) {
  store_.set(mapped_key(group_.rank), error);
  posted_.push_back(mapped_key(group_.rank));
  while (!store_.check(all(&Rendezvous::mapped_key))) {
    if (!wait_a_little()) {
      // This is not withdrawn: peers would name this rank as missing in their errors, and they must not succeed later.
      store_.set(mapped_key(group_.rank), c10::str("rank ", group_.rank, " gave up waiting for its peers"));
      posted_.pop_back();
      throw_timeout("map the memory of all ranks", [this](int r) { return store_.check({mapped_key(r)}); });
    }
  }
  std::vector<std::string> errors;
  for (const auto& value : store_.get_all(all(&Rendezvous::mapped_key))) {
    errors.emplace_back(value.begin(), value.end());
  }
  done_ = true;
  posted_.pop_back();  // a slower rank still reads it; the last reader removes all
  if (store_.add(key("done"), 1) == group_.size) {
    for (const std::string& mapped : all(&Rendezvous::mapped_key)) posted_.push_back(mapped);
    posted_.push_back(key("done"));
  }
  return errors;
}

}  // namespace fusedcomm
