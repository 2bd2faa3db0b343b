// Products of float8 values with their scales, as fusedcomm.run.scaled_matmul has them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include <optional>
#include <utility>

namespace fusedcomm {

struct ScaledProduct {
  bool adds;      // to what is there
  bool by_torch;  // torch has a matmul of such values, with one scale for all of K
  bool fast;      // sums may have fewer bits than float32
};

constexpr int64_t kScaleBlock = 128;

inline at::Tensor dequantized(const at::Tensor& t, at::Tensor scale) {
  for (const int64_t dim : {0, 1}) {
    if (scale.size(dim) == 1 || scale.size(dim) == t.size(dim)) continue;
    scale = scale.repeat_interleave(kScaleBlock, dim).narrow(dim, 0, t.size(dim));
  }
  return t.to(at::kFloat).mul_(scale);
}

inline bool is_one_number(const at::Tensor& scale) {
  return (scale.size(0) == 1 || scale.stride(0) == 0) && (scale.size(1) == 1 || scale.stride(1) == 0);
}

// `out`, where torch can write it; else the product in float32, without the bias.
inline at::Tensor product_by_torch(at::Tensor& out, at::Tensor x, at::Tensor w, const at::Tensor& scale_x,
                                   const at::Tensor& scale_w, const std::optional<at::Tensor>& bias,
                                   const ScaledProduct& product) {
  const bool is_loadable = w.stride(0) == 1 && w.stride(1) % 16 == 0 && reinterpret_cast<uintptr_t>(w.data_ptr()) % 16 == 0;
  x = x.contiguous();
  if (!is_loadable) w = w.mT().clone(at::MemoryFormat::Contiguous).mT();
  const bool tensor_wise = is_one_number(scale_x) && is_one_number(scale_w);
  if (!product.adds && out.scalar_type() == at::kBFloat16 && out.is_contiguous() && (tensor_wise || out.is_cuda())) {
    const auto [of_x, of_w] = tensor_wise ? std::pair(scale_x[0][0], scale_w[0][0])
                                          : std::pair(scale_x.expand({x.size(0), 1}).contiguous(),
                                                      scale_w.expand({1, w.size(1)}).contiguous());
    at::_scaled_mm_out(out, x, w, of_x, of_w, bias, std::nullopt, at::kBFloat16, product.fast);
    return out;
  }
  const at::Tensor one = at::ones({}, scale_x.options());
  return at::_scaled_mm(x, w, one, one, std::nullopt, std::nullopt, at::kFloat, product.fast).mul_(scale_x).mul_(scale_w);
}

// out = (x * scale_x) @ (w * scale_w) + bias, or out += ... in float32; [M, K] @ [K, N], or with batches.
inline void scaled_multiply(at::Tensor out, const at::Tensor& x, const at::Tensor& w, const at::Tensor& scale_x,
                            const at::Tensor& scale_w, const std::optional<at::Tensor>& bias,
                            const ScaledProduct& product) {
  if (out.dim() == 3) {
    for (int64_t i = 0; i < out.size(0); ++i) {
      scaled_multiply(out[i], x[i], w[i], scale_x[i], scale_w[i], bias, product);
    }
    return;
  }
  at::Tensor y = product.by_torch ? product_by_torch(out, x, w, scale_x, scale_w, bias, product)
                                  : at::mm(dequantized(x, scale_x), dequantized(w, scale_w));
  if (y.is_same(out)) return;
  if (bias) y.add_(*bias);
  product.adds ? out.add_(y) : out.copy_(y);
}

}  // namespace fusedcomm
