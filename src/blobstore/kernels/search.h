// Quantize by search: per group the scale (and bias), as stored, with the least squared error found. The candidates, and
// why these, are in docs/quantization.md.
//
// N groups are searched side by side, each in its own lane, so that no sum ever crosses lanes: the result does not depend
// on N. A group keeps what minmax gives it unless a candidate is better by more than rounding can explain.
#pragma once

#include "quantize.h"

namespace blobstore::BLOBSTORE_TARGET {

inline constexpr std::size_t largest_group = 128;  // of docs/formats.md section 3, like all group sizes
inline constexpr float clearly = 1.0f - 0x1p-14f;

// Sums in four interleaved parts: an order that every target and the twin can keep, with a short chain of additions.
template <typename F>
struct Sum {
  F part[4] = {};
  void add(std::size_t i, F value) { part[i % 4] = part[i % 4] + value; }
  F total() const { return (part[0] + part[1]) + (part[2] + part[3]); }
};

template <typename F>
struct Range {
  F low;
  F high;
};

// N groups of weights by column, and what each column counts: 1 unless the importance is given.
template <std::size_t N>
struct Columns {
  using F = typename Lanes<N>::F;
  const std::size_t count;
  const bool weighted;
  F weights[largest_group];
  F importance[largest_group];

  // The groups from weight `first` of the job on, times a factor.
  template <typename Float>
  Columns(Float, const QuantizeJob& job, std::size_t first, float factor)
      : count(job.group_size), weighted(job.importance != nullptr) {
    const auto* from = static_cast<const typename Float::Bits*>(job.weights) + first;
    float lanes[N];
    for (std::size_t i = 0; i < count; ++i) {
      for (std::size_t g = 0; g < N; ++g) lanes[g] = Float::decode(std::uint32_t{from[g * count + i]});
      weights[i] = load<F>(lanes) * factor;
    }
    for (std::size_t i = 0; weighted && i < count; ++i) {
      for (std::size_t g = 0; g < N; ++g) {
        lanes[g] = job.importance[(job.first_column + first + g * count + i) % job.columns];
      }
      importance[i] = load<F>(lanes);
    }
  }
  F counted(std::size_t i, F value) const { return weighted ? importance[i] * value : value; }
  // The extremes of all weights, or of those that count; infinities the wrong way round when none does.
  Range<F> range(bool counting) const {
    Range<F> found = {all_of<F>(std::numeric_limits<float>::infinity()), all_of<F>(-std::numeric_limits<float>::infinity())};
    for (std::size_t i = 0; i < count; ++i) {
      const auto counts = (counting && weighted ? importance[i] : all_of<F>(1.0f)) > 0.0f;
      found.low = counts ? min_of(found.low, weights[i]) : found.low;
      found.high = counts ? max_of(found.high, weights[i]) : found.high;
    }
    return found;
  }
  F total_importance() const {
    if (!weighted) return all_of<F>(static_cast<float>(count));
    Sum<F> sum;
    for (std::size_t i = 0; i < count; ++i) sum.add(i, importance[i]);
    return sum.total();
  }
};

// The affine types.

template <typename Float, unsigned bits, std::size_t N>
class AffineSearch {
  using F = typename Lanes<N>::F;
  static constexpr float levels = (1u << bits) - 1;

 public:
  AffineSearch(const Columns<N>& columns, Affine<F> minmax)
      : columns_(columns),
        total_importance_(columns.total_importance()),
        stored_{rounded(minmax.scale), rounded(minmax.bias)},
        code_by_(minmax) {
    Sum<F> weights, error;
    for (std::size_t i = 0; i < columns.count; ++i) {
      weights.add(i, columns.counted(i, columns.weights[i]));
      const F code = whole(clamped((columns.weights[i] - minmax.bias) / minmax.scale, levels));
      error.add(i, squared_error(i, code, stored_));
    }
    mean_ = weights.total() / total_importance_;
    least_ = error.total() * clearly;
  }

  // `range` is that of the weights that count.
  void run(Range<F> range, const AffineCandidates& candidates) {
    attempt(stored_);
    const F span = range.high - range.low;
    const F step = span / levels;
    const auto from_high = abs_of(range.high) < abs_of(range.low);  // the bias at the end nearer to zero has the finer grid
    for (std::size_t k = 0; k < candidates.shift_count; ++k) {
      F least = all_of<F>(std::numeric_limits<float>::infinity());
      Affine<F> best = {F{}, F{}};
      for (std::size_t j = 0; j < candidates.factor_count; ++j) {
        const F scale = rounded(step * candidates.factors[j]);
        const F reach = scale * levels;
        const F slack = span - reach;
        const F shift = max_of(abs_of(slack), scale * 0.75f) * candidates.shifts[k];
        const F bottom = (range.low + slack * 0.5f) + shift;
        const Affine<F> candidate = {from_high ? -scale : scale, rounded(from_high ? bottom + reach : bottom)};
        const F error = attempt(candidate);
        const auto better = error < least;
        least = better ? error : least;
        best = {better ? candidate.scale : best.scale, better ? candidate.bias : best.bias};
      }
      const Line line = fit(best);
      const F scale = rounded(line.slope);
      attempt({scale, rounded(mean_ - scale * line.mean_code)});
    }
    const Line line = fit(stored_);
    const F scale = rounded(line.slope);
    for (const float up : {1.0f, below, above}) {
      const F near = rounded(scale * up);
      const F bias = rounded(mean_ - near * line.mean_code);
      attempt({near, bias});
      if (!candidates.neighbours) continue;
      attempt({near, rounded(bias * below)});
      attempt({near, rounded(bias * above)});
    }
  }

  Affine<F> stored() const { return stored_; }
  // What weights are coded by: minmax codes by its scale and bias before they are rounded.
  Affine<F> code_by() const { return code_by_; }

 private:
  // A BF16 value times these is its neighbour: they are between half an ulp and one and a half for every mantissa.
  static constexpr float below = 0.9945f;
  static constexpr float above = 1.0055f;
  struct Line {
    F slope;
    F mean_code;
  };

  static F rounded(F value) { return Float::decode(Float::encode(value)); }
  static F whole(F value) { return (value + code_rounder) - code_rounder; }
  F squared_error(std::size_t i, F code, Affine<F> by) const {
    const F product = code * by.scale;
    const F difference = (product + by.bias) - columns_.weights[i];
    return columns_.counted(i, difference * difference);
  }
  // Scales whose inverse or square could leave float32's normal numbers are not tried.
  static auto is_usable(F scale) {
    const F magnitude = abs_of(scale);
    return (magnitude >= 0x1p-60f) & (magnitude <= 0x1p60f);
  }
  static F code(F weight, F bias, F inverse) { return whole(clamped((weight - bias) * inverse, levels)); }

  // Tries a scale and bias as stored; returns their error.
  F attempt(Affine<F> candidate) {
    const F inverse = 1.0f / candidate.scale;
    Sum<F> sum;
    for (std::size_t i = 0; i < columns_.count; ++i) {
      sum.add(i, squared_error(i, code(columns_.weights[i], candidate.bias, inverse), candidate));
    }
    const F error = is_usable(candidate.scale) ? sum.total() : all_of<F>(std::numeric_limits<float>::infinity());
    const auto better = error < least_;
    least_ = better ? error : least_;
    stored_ = {better ? candidate.scale : stored_.scale, better ? candidate.bias : stored_.bias};
    code_by_ = {better ? candidate.scale : code_by_.scale, better ? candidate.bias : code_by_.bias};
    return error;
  }

  // The line through (code, weight) with the least squared error, for the codes that a scale and bias give.
  Line fit(Affine<F> by) const {
    const F inverse = 1.0f / by.scale;
    Sum<F> codes, squares, products;
    for (std::size_t i = 0; i < columns_.count; ++i) {
      const F code = this->code(columns_.weights[i], by.bias, inverse);
      const F counted = columns_.counted(i, code);
      codes.add(i, counted);
      squares.add(i, counted * code);
      products.add(i, counted * (columns_.weights[i] - mean_));
    }
    const F mean_code = codes.total() / total_importance_;
    const F spread = squares.total() - codes.total() * mean_code;
    return {products.total() / spread, mean_code};
  }

  const Columns<N>& columns_;
  F total_importance_;
  F mean_;
  F least_;
  Affine<F> stored_;
  Affine<F> code_by_;
};

template <typename Float, unsigned bits, std::size_t N>
inline void search_affine_block(const QuantizeJob& job, std::size_t first, std::byte* codes, typename Float::Bits* scales,
                                typename Float::Bits* biases) {
  using F = typename Lanes<N>::F;
  const auto* weights = static_cast<const typename Float::Bits*>(job.weights) + first;
  const Columns<N> columns(Float(), job, first, 1.0f);
  const Range<F> all = columns.range(false);
  AffineSearch<Float, bits, N> found(columns, affine_of(all.low, all.high, (1u << bits) - 1));
  found.run(columns.range(true), job.candidates);
  store_narrow<typename Float::Bits, N>(scales, Float::encode(found.stored().scale));
  store_narrow<typename Float::Bits, N>(biases, Float::encode(found.stored().bias));
  float scale[N], bias[N];
  store(scale, found.code_by().scale);
  store(bias, found.code_by().bias);
  for (std::size_t g = 0; g < N; ++g) {
    const std::size_t start = g * job.group_size;
    encode_affine<Float, bits, N>(weights + start, job.group_size, scale[g], bias[g], codes + start * bits / 8);
  }
}

// The fp types. Candidate scales go down from the largest that can be best. Twice a scale is never better than the scale,
// when no weight is beyond what rounds to the largest code: each multiple of a code of the one is one of the other. It ends
// when what the largest weight loses by saturation alone is more than the least error so far.

// E4M3 scales have the same values whatever the group.
template <typename Code, std::size_t N>
struct E4M3Candidates {
  using F = typename Lanes<N>::F;
  using U = typename Lanes<N>::U;
  F unit = all_of<F>(1.0f);
  U lowest = all_of<U>(1u);
  U top;
  explicit E4M3Candidates(F amax) {
    // The smallest scale that no weight is beyond; from twice the smallest normal scale on, codes 8 apart are a factor
    // of two apart, and below it every odd code has no half.
    const U near = E4M3::encode(amax / Code::beyond);
    const U needed = E4M3::decode(near) * Code::beyond < amax ? near + 1u : near;
    top = min_of(max_of(needed, all_of<U>(8u)) + 7u, all_of<U>(0x7eu));
  }
  F relative(U code) const { return E4M3::decode(code); }
};

// E8M0 scales are taken relative to the largest that can be best, so that no square leaves float32's range.
template <typename Code, std::size_t N>
struct E8M0Candidates {
  using F = typename Lanes<N>::F;
  using U = typename Lanes<N>::U;
  U top;
  U lowest;
  F unit;
  explicit E8M0Candidates(F amax) : top(E8M0::encode_up(amax / Code::max)) {
    lowest = max_of(top, all_of<U>(126u)) - 126u;
    unit = 1.0f / E8M0::decode(top);
  }
  F relative(U code) const { return float_of(min_of(code + 127u - top, all_of<U>(254u)) << 23); }
};

template <typename Type, std::size_t N>
class FpSearch {
  using F = typename Lanes<N>::F;
  using U = typename Lanes<N>::U;
  using Code = typename Type::Code;
  static constexpr bool powers = std::is_same_v<typename Type::Scale, PowerOfTwoScale>;
  using Candidates = std::conditional_t<powers, E8M0Candidates<Code, N>, E4M3Candidates<Code, N>>;

 public:
  // The stored bits of the best scales of the groups; `minmax` are those that minmax gives.
  static U best(const Columns<N>& columns, U minmax) {
    F amax = F{};
    F lightest = all_of<F>(std::numeric_limits<float>::max());
    for (std::size_t i = 0; i < columns.count; ++i) {
      const auto counts = columns.weighted ? columns.importance[i] > 0.0f : all_of<F>(1.0f) > 0.0f;
      amax = counts ? max_of(amax, abs_of(columns.weights[i])) : amax;
      if (columns.weighted) lightest = counts ? min_of(lightest, columns.importance[i]) : lightest;
    }
    if (!columns.weighted) lightest = all_of<F>(1.0f);
    const Candidates candidates(amax);
    const F largest = amax * candidates.unit;
    U found = minmax;
    F least = error_of(columns, candidates.unit, candidates.relative(minmax)) * clearly;
    auto open = least > 0.0f;
    for (U code = candidates.top;; code = code - 1u) {
      const F scale = candidates.relative(code);
      const F lost = max_of(largest - scale * Code::max, all_of<F>(0.0f));
      open = open & ((lost * lost) * lightest < least) & (code >= candidates.lowest) & (code <= candidates.top);
      if (!any_of(open)) return found;
      const F error = error_of(columns, candidates.unit, scale);
      const auto better = open & (error < least);
      least = better ? error : least;
      found = better ? code : found;
    }
  }

 private:
  // The squared error with a scale, in units of the candidates' unit; a scale of zero loses everything.
  static F error_of(const Columns<N>& columns, F unit, F scale) {
    const F inverse = scale == 0.0f ? all_of<F>(0.0f) : 1.0f / scale;
    Sum<F> sum;
    for (std::size_t i = 0; i < columns.count; ++i) {
      const F weight = abs_of(columns.weights[i]) * unit;
      const F difference = weight - Code::round_up_to(weight * inverse, Code::max) * scale;
      sum.add(i, columns.counted(i, difference * difference));
    }
    return sum.total();
  }
};

template <typename Float, typename Type, std::size_t N>
inline void search_fp_block(const QuantizeJob& job, std::size_t first, std::byte* codes, std::uint8_t* scales) {
  using F = typename Lanes<N>::F;
  using Scale = typename Type::Scale;
  constexpr std::size_t encode_lanes = N < Type::group_size / 2 ? N : Type::group_size / 2;
  const float inverse_global = 1.0f / job.global_scale;
  const auto* weights = static_cast<const typename Float::Bits*>(job.weights) + first;
  const Columns<N> columns(Float(), job, first, inverse_global);
  F amax = F{};
  for (std::size_t i = 0; i < Type::group_size; ++i) amax = max_of(amax, abs_of(columns.weights[i]));
  const auto stored = FpSearch<Type, N>::best(columns, Scale::encode(amax, Type::Code::max));
  store_narrow<std::uint8_t, N>(scales, stored);
  const F decoded = Scale::decode(stored);
  float scale[N], inverse[N];
  store(scale, decoded);
  store(inverse, 1.0f / decoded);
  for (std::size_t g = 0; g < N; ++g) {
    const std::size_t start = g * Type::group_size;
    encode_fp<Float, Type, encode_lanes>(weights + start, {scale[g], inverse[g], inverse_global},
                                         codes + start * Type::Code::bits / 8);
  }
}

}  // namespace blobstore::BLOBSTORE_TARGET
