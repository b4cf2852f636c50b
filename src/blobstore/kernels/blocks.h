// Decode codes of row-major matrices; each block of rows and columns has a scale. Codes are E4M3,
// E5M2, whole numbers, or of 4 bits with a table of values.
//
// Values do not depend on each other, so the result is the same however a run is cut.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

struct Int8 { static constexpr unsigned bits = 8; };
struct Table { static constexpr unsigned bits = 4; };  // the first code of two is in the high bits

// code * scale, rounded to float32; whole numbers are parts of 127, as in LLM.int8.
template <typename Code, typename U, typename Scale>
inline FloatOf<U> value_of(const BlocksJob& job, U code, Scale scale) {
  if constexpr (std::is_same_v<Code, Table>) {
    return look_up(job.values, code) * scale;
  } else if constexpr (std::is_same_v<Code, Int8>) {
    const FloatOf<U> value = whole_numbers<sizeof(U) / 4>(code ^ 0x80u) - 128.0f;
    return value * scale * 0x1.020408p-7f;
  } else {
    return decoded<Code>(code) * scale;
  }
}

// A Scale is one float for all codes, or a vector with one for each. In BF16 every NaN is 0x7fc0.
template <typename Out, typename Code, std::size_t N, typename Scale>
inline void decode_unit(const BlocksJob& job, const std::byte* codes, Scale even_scale,
                        Scale odd_scale, typename Out::Bits* out) {
  Words<N> even, odd;
  load_codes<Code::bits, N>(codes, even, odd);
  if constexpr (Code::bits == 4) std::swap(even, odd);
  store_unit<Out, N>(out, {value_of<Code>(job, even, even_scale),
                           value_of<Code>(job, odd, odd_scale)});
}

// The place in a run of codes, and the scale there; it moves forwards only, through rows and
// matrices.
class ScaleWalk {
 public:
  explicit ScaleWalk(const BlocksJob& job)
      : scales_(job.scales),
        rows_(job.rows),
        cols_(job.cols),
        block_rows_(job.block_rows),
        block_cols_(job.block_cols),
        blocks_((job.cols - 1) / job.block_cols + 1),
        row_(job.row),
        column_(job.column),
        // Wraps around; adding a column's block wraps it back.
        row_of_scales_(std::size_t{0} - job.blocks_before) {}

  float scale() const {
    return scales_[row_of_scales_ + column_ / block_cols_];
  }
  // How many codes from here on are in this row of this block.
  std::size_t left() const { return std::min(block_cols_ - column_ % block_cols_, cols_ - column_); }
  // Moves on by as many codes, `left` at most.
  void skip(std::size_t count) {
    column_ += count;
    if (column_ < cols_) return;
    column_ = 0;
    if (++row_ == rows_) row_ = 0;
    if (row_ % block_rows_ == 0) row_of_scales_ += blocks_;
  }

 private:
  const float* scales_;
  std::size_t rows_, cols_, block_rows_, block_cols_, blocks_, row_, column_, row_of_scales_;
};

// Up to a whole unit of codes with several scales, from the walk's place on.
template <typename Out, typename Code, std::size_t N>
inline void decode_mixed(const BlocksJob& job, ScaleWalk& walk, const std::byte* codes,
                         std::size_t count, typename Out::Bits* out) {
  std::uint32_t scales[Unit<N>::size] = {};
  for (std::size_t i = 0; i < count;) {
    const std::size_t size = std::min(walk.left(), count - i);
    std::fill_n(scales + i, size, bits_of(walk.scale()));
    walk.skip(size);
    i += size;
  }
  const Unit<N> unit = load_unit<F32, N>(scales);
  decode_unit<Out, Code, N>(job, codes, unit.even, unit.odd, out);
}

template <typename Out, typename Code, std::size_t N>
void decode_blocks(const BlocksJob& given) {
  const BlocksJob job = given;  // a copy, which storing values can't change
  if (job.count == 0) return;
  constexpr std::size_t size = Unit<N>::size;
  const auto codes_at = [&](std::size_t i) { return job.codes + i * Code::bits / 8; };
  auto* const out = static_cast<typename Out::Bits*>(job.out);
  ScaleWalk walk(job);
  std::size_t i = 0;
  while (job.count - i >= size) {
    if (walk.left() < size) {
      decode_mixed<Out, Code, N>(job, walk, codes_at(i), size, out + i);
      i += size;
      continue;
    }
    const float scale = walk.scale();
    const std::size_t end = i + std::min(walk.left(), job.count - i) / size * size;
    walk.skip(end - i);
    for (; i < end; i += size) {
      decode_unit<Out, Code, N>(job, codes_at(i), scale, scale, out + i);
    }
  }
  if (i == job.count) return;
  std::byte rest[size] = {};  // nothing beyond the run is read or written
  typename Out::Bits values[size];
  std::memcpy(rest, codes_at(i), ((job.count - i) * Code::bits + 7) / 8);
  decode_mixed<Out, Code, N>(job, walk, rest, job.count - i, values);
  std::memcpy(out + i, values, (job.count - i) * sizeof values[0]);
}

}  // namespace blobstore::BLOBSTORE_TARGET
