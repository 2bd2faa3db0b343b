// RMSNorm of rows, with the same bits wherever a call runs.
#pragma once

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <array>
#include <cmath>

namespace fusedcomm {

constexpr int64_t kLanes = 16;  // partial sums of a row: the compiler vectorises them, in one order everywhere

template <typename T, typename W>
void rms_norm_row(T* out, const T* x, const W* weight, int64_t n, float eps) {
  std::array<float, kLanes> lanes{};
  const int64_t whole = n - n % kLanes;
  for (int64_t i = 0; i < whole; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const auto value = static_cast<float>(x[i + lane]);
      lanes[lane] += value * value;
    }
  }
  for (int64_t i = whole; i < n; ++i) lanes[i - whole] += static_cast<float>(x[i]) * static_cast<float>(x[i]);
  float sum = 0;
  for (const float lane : lanes) sum += lane;
  const float scale = 1 / std::sqrt(sum / static_cast<float>(n) + eps);
  if (weight == nullptr) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<T>(static_cast<float>(x[i]) * scale);
  } else {
    for (int64_t i = 0; i < n; ++i) {
      out[i] = static_cast<T>(static_cast<float>(x[i]) * scale * static_cast<float>(weight[i]));
    }
  }
}

// out = x / sqrt(mean(x ** 2) + eps) * weight of each row [..., N]: in float32, rounded once. All are contiguous; weight
// has x's dtype, or float32.
inline void rms_norm(at::Tensor& out, const at::Tensor& x, const at::Tensor* weight, double eps) {
  const int64_t n = x.size(-1), num_rows = n == 0 ? 0 : x.numel() / n;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "rms_norm", [&] {
    auto* to = out.mutable_data_ptr<scalar_t>();
    const auto* from = x.const_data_ptr<scalar_t>();
    const auto by = [&](const auto* scales) {
      at::parallel_for(0, num_rows, std::max<int64_t>(1, 32768 / std::max<int64_t>(n, 1)), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) {
          rms_norm_row(to + row * n, from + row * n, scales, n, static_cast<float>(eps));
        }
      });
    };
    if (weight == nullptr || weight->scalar_type() == x.scalar_type()) {
      by(weight == nullptr ? nullptr : weight->const_data_ptr<scalar_t>());
    } else {
      by(weight->const_data_ptr<float>());
    }
  });
}

}  // namespace fusedcomm
