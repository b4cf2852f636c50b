// Search for int4 and int8: per group the scale and bias, as stored, with the least squared error
// of a fixed list of candidates. docs/quantization.md says which, and why.
#pragma once

#include "columns.h"

namespace blobstore::BLOBSTORE_TARGET {

// Not inlined, because that multiplies the time that compilers take.
template <typename Float, std::size_t N>
class AffineSearch {
  using F = Floats<N>;

 public:
  [[gnu::noinline]] AffineSearch(const Columns<N>& columns, Affine<F> minmax, float levels)
      : columns_(columns),
        levels_(levels),
        total_importance_(columns.total_importance()),
        stored_{rounded(minmax.scale), rounded(minmax.bias)},
        code_by_(minmax) {
    Sum<F> weights, error;
    for (std::size_t i = 0; i < columns.count; ++i) {
      weights.add(i, columns.counted(i, columns.weights[i]));
      const F code = whole(clamped((columns.weights[i] - minmax.bias) / minmax.scale, levels_));
      error.add(i, squared_error(i, code, stored_));
    }
    mean_ = weights.total() / total_importance_;
    least_ = error.total() * clearly;
  }

  // `range` is that of the weights that count.
  [[gnu::noinline]] void run(Range<F> range, const AffineCandidates& candidates) {
    attempt(stored_);
    const F span = range.high - range.low;
    const F step = span / levels_;
    // The bias at the end nearer to zero has the finer grid.
    const auto from_high = abs_of(range.high) < abs_of(range.low);
    for (std::size_t k = 0; k < candidates.shift_count; ++k) {
      F least = all_of<F>(std::numeric_limits<float>::infinity());
      Affine<F> best = {F{}, F{}};
      for (std::size_t j = 0; j < candidates.factor_count; ++j) {
        const F scale = rounded(step * candidates.factors[j]);
        const F reach = scale * levels_;
        const F slack = span - reach;
        const F shift = max_of(abs_of(slack), scale * 0.75f) * candidates.shifts[k];
        const F bottom = (range.low + slack * 0.5f) + shift;
        const Affine<F> candidate = {from_high ? -scale : scale,
                                     rounded(from_high ? bottom + reach : bottom)};
        const F error = attempt(candidate);
        const auto better = error < least;
        least = better ? error : least;
        best = chosen(better, candidate, best);
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
  // A BF16 value times these is its neighbour: they are between half an ulp and one and a half for
  // every mantissa.
  static constexpr float below = 0.9945f;
  static constexpr float above = 1.0055f;
  struct Line {
    F slope, mean_code;
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
  F code(F weight, F bias, F inverse) const {
    return whole(clamped((weight - bias) * inverse, levels_));
  }
  static Affine<F> chosen(auto mask, Affine<F> yes, Affine<F> no) {
    return {mask ? yes.scale : no.scale, mask ? yes.bias : no.bias};
  }

  // Tries a scale and bias as stored; returns their error.
  F attempt(Affine<F> candidate) {
    const F inverse = 1.0f / candidate.scale;
    Sum<F> sum;
    for (std::size_t i = 0; i < columns_.count; ++i) {
      sum.add(i, squared_error(i, code(columns_.weights[i], candidate.bias, inverse), candidate));
    }
    const F infinite = all_of<F>(std::numeric_limits<float>::infinity());
    const F error = is_usable(candidate.scale) ? sum.total() : infinite;
    const auto better = error < least_;
    least_ = better ? error : least_;
    stored_ = chosen(better, candidate, stored_);
    code_by_ = chosen(better, candidate, code_by_);
    return error;
  }

  // The line through (code, weight) with the least squared error, for the codes that a scale and
  // bias give.
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
  float levels_;
  F total_importance_, mean_, least_;
  Affine<F> stored_, code_by_;
};

// Searches for the N groups from weight `first` on.
template <typename Float, unsigned bits, std::size_t N>
inline void search_affine_block(const QuantizeJob& job, std::size_t first) {
  using Bits = typename Float::Bits;
  const std::size_t group = first / job.group_size;
  const Columns<N> columns(Float(), job, first, 1.0f);
  const auto all = columns.range(false);
  constexpr float levels = (1u << bits) - 1;
  AffineSearch<Float, N> found(columns, affine_of(all.low, all.high, levels), levels);
  found.run(columns.range(true), job.candidates);
  const auto stored = found.stored();
  store_narrow<Bits, N>(static_cast<Bits*>(job.scales) + group, Float::encode(stored.scale));
  store_narrow<Bits, N>(static_cast<Bits*>(job.biases) + group, Float::encode(stored.bias));
  float scale[N], bias[N];
  store(scale, found.code_by().scale);
  store(bias, found.code_by().bias);
  encode_affine<Float, bits, N>(job, first, N, scale, bias);
}

}  // namespace blobstore::BLOBSTORE_TARGET
