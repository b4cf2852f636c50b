// Search for the fp types: per group the stored scale with the least squared error of all that the
// format has.
//
// Candidate scales go down from the largest that can be best. Twice a scale is never better than
// the scale if every weight rounds to a code without saturation: each multiple of a code of the one
// is one of the other. The search ends when saturation of one weight alone costs more than the
// least error so far.
#pragma once

#include "columns.h"

namespace blobstore::BLOBSTORE_TARGET {

// E4M3 scales have the same values whatever the group.
template <typename Code, std::size_t N>
struct E4M3Candidates {
  using F = Floats<N>;
  using U = Words<N>;
  F unit = all_of<F>(1.0f);
  U lowest = all_of<U>(1u);
  U top;
  explicit E4M3Candidates(F amax) {
    // The smallest scale that no weight is beyond; from twice the smallest normal scale on, codes 8
    // apart are a factor of two apart, and below it odd codes have no half.
    const U near = E4M3::encode(amax / Code::beyond);
    const U needed = E4M3::decode(near) * Code::beyond < amax ? near + 1u : near;
    top = min_of(max_of(needed, all_of<U>(8u)) + 7u, all_of<U>(0x7eu));
  }
  F relative(U code) const { return E4M3::decode(code); }
};

// E8M0 scales are relative to the largest that can be best, so that squares stay in float32's
// range.
template <typename Code, std::size_t N>
struct E8M0Candidates {
  using F = Floats<N>;
  using U = Words<N>;
  U top, lowest;
  F unit;
  explicit E8M0Candidates(F amax) : top(E8M0::encode(amax / Code::max)) {
    lowest = max_of(top, all_of<U>(126u)) - 126u;
    unit = 1.0f / E8M0::decode(top);
  }
  F relative(U code) const { return float_of(min_of(code + 127u - top, all_of<U>(254u)) << 23); }
};

template <typename Type, std::size_t N>
class FpSearch {
  using F = Floats<N>;
  using U = Words<N>;
  using Code = typename Type::Code;
  static constexpr bool powers = std::is_same_v<typename Type::Scale, E8M0>;
  using Candidates = std::conditional_t<powers, E8M0Candidates<Code, N>, E4M3Candidates<Code, N>>;

 public:
  // The stored bits of the best scales of the groups; `minmax` are those that minmax gives.
  [[gnu::noinline]] static U best(const Columns<N>& columns, U minmax) {
    F amax = F{};
    for (std::size_t i = 0; i < columns.count; ++i) {
      const F magnitude = abs_of(columns.weights[i]);
      const auto counts = (columns.weighted ? columns.importance[i] : all_of<F>(1.0f)) > 0.0f;
      amax = max_of(amax, counts ? magnitude : F{});
    }
    const Candidates candidates(amax);
    const Peak peak = peak_of(columns, candidates.unit, amax);
    U found = minmax;
    F least = error_of(columns, candidates.unit, candidates.relative(minmax)) * clearly;
    auto open = least > 0.0f;
    for (U code = candidates.top;; code = code - 1u) {
      const F scale = candidates.relative(code);
      const F lost = max_of(peak.magnitude - scale * Code::max, all_of<F>(0.0f));
      open = open & ((lost * lost) * peak.importance < least);
      open = open & (code >= candidates.lowest) & (code <= candidates.top);
      if (!any_of(open)) return found;
      const F error = error_of(columns, candidates.unit, scale);
      const auto better = open & (error < least);
      least = better ? error : least;
      found = better ? code : found;
    }
  }

 private:
  // The weight that would cost most if it were lost: its cost by saturation bounds a scale's error
  // from below.
  struct Peak {
    F magnitude, importance;
  };
  static Peak peak_of(const Columns<N>& columns, F unit, F amax) {
    if (!columns.weighted) return {amax * unit, all_of<F>(1.0f)};
    Peak found = {F{}, F{}};
    F most = F{};
    for (std::size_t i = 0; i < columns.count; ++i) {
      const F magnitude = abs_of(columns.weights[i]) * unit;
      const F cost = columns.counted(i, magnitude * magnitude);
      const auto more = cost > most;
      most = more ? cost : most;
      found = {more ? magnitude : found.magnitude, more ? columns.importance[i] : found.importance};
    }
    return found;
  }

  // The squared error with a scale, in units of the candidates' unit; a scale of zero loses
  // everything.
  static F error_of(const Columns<N>& columns, F unit, F scale) {
    const F inverse = scale == 0.0f ? all_of<F>(0.0f) : 1.0f / scale;
    Sum<F> sum;
    for (std::size_t i = 0; i < columns.count; ++i) {
      const F weight = abs_of(columns.weights[i]) * unit;
      const F difference = weight - Code::rounded_magnitude(weight * inverse) * scale;
      sum.add(i, columns.counted(i, difference * difference));
    }
    return sum.total();
  }
};

// Searches for the N groups from weight `first` on.
template <typename Float, typename Type, std::size_t N>
inline void search_fp_block(const QuantizeJob& job, std::size_t first) {
  using Scale = typename Type::Scale;
  const float inverse_global = 1.0f / job.global_scale;
  const Columns<N> columns(Float(), job, first, inverse_global);
  Floats<N> amax = {};
  for (std::size_t i = 0; i < columns.count; ++i) amax = max_of(amax, abs_of(columns.weights[i]));
  const auto stored = FpSearch<Type, N>::best(columns, Scale::encode(amax / Type::Code::max));
  auto* const scales = static_cast<std::uint8_t*>(job.scales) + first / Type::group_size;
  store_narrow<std::uint8_t, N>(scales, stored);
  const auto decoded = Scale::decode(stored);
  float scale[N], inverse[N];
  store(scale, decoded);
  store(inverse, 1.0f / decoded);
  encode_fp<Float, Type, lanes_for<Type, N>>(job, first, N, scale, inverse, inverse_global);
}

}  // namespace blobstore::BLOBSTORE_TARGET
