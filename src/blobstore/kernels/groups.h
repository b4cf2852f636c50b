// The arithmetic of one group (docs/quantization.md): its scale and bias from its extremes, its
// codes from those.
//
// Each function serves one group or several at once, one a lane.
#pragma once

#include "formats.h"

namespace blobstore::BLOBSTORE_TARGET {

// To the nearest whole number, a tie to the even one; infinities and NaN stay.
template <typename F>
inline F round_to_whole(F value) {
  const F magnitude = abs_of(value);
  const F rounded = (magnitude + 0x1p23f) - 0x1p23f;
  const F whole = magnitude < 0x1p23f ? rounded : magnitude;
  return float_of(bits_of(whole) | (bits_of(value) & 0x80000000u));
}

template <typename F>
struct Affine {
  F scale, bias;
};

// MLX's choice of scale and bias (mlx@v0.32.4 mlx/backend/cpu/quantized.cpp: quantize): the edge
// farther from zero is met exactly, and zero is a code.
template <typename F>
inline Affine<F> affine_of(F low, F high, float levels) {
  const F step = max_of((high - low) / levels, all_of<F>(1e-7f));
  const auto low_is_edge = abs_of(low) > abs_of(high);
  const F edge = low_is_edge ? low : high;
  const F scale = low_is_edge ? step : -step;
  const F steps = round_to_whole(edge / scale);
  const auto has_bias = steps != 0.0f;
  const F fitted = edge / steps;
  return {has_bias ? fitted : scale, has_bias ? edge : all_of<F>(0.0f)};
}

// Groups that are worked on together: their weights and extremes fit the first cache.
inline constexpr std::size_t tile_groups = 32;

// value in [0, levels]; NaN gives 0.
template <typename F>
inline F clamped(F value, float levels) {
  const F positive = max_of(value, all_of<F>(0.0f));
  return min_of(positive, all_of<F>(levels));
}

inline constexpr float code_rounder = 0x1.8p23f;

// round-half-to-even of value clamped to [0, levels], in the low bits; the bits above the code are
// not cleared. Clamping first is the same, since both bounds are whole, and lets the rounding be
// one addition.
template <typename F>
inline BitsOf<F> affine_code(F value, float levels) {
  return bits_of(clamped(value, levels) + code_rounder);
}

// The fp types: how wide a group is, and the formats of its codes and of its scale, which is stored
// as Scale::encode(amax / Code::max).
struct Nvfp4 {
  using Code = E2M1;
  using Scale = E4M3;
  static constexpr std::size_t group_size = 16;
};
struct Mxfp4 {
  using Code = E2M1;
  using Scale = E8M0;
  static constexpr std::size_t group_size = 32;
};
struct Mxfp8 {
  using Code = E4M3;
  using Scale = E8M0;
  static constexpr std::size_t group_size = 32;
};

// As many lanes as a target has, and no more than half a group.
template <typename Type, std::size_t most>
inline constexpr std::size_t lanes_for = most < Type::group_size / 2 ? most : Type::group_size / 2;

}  // namespace blobstore::BLOBSTORE_TARGET
