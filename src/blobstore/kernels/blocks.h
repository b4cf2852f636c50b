// Decode FP8 weights: E4M3 or E5M2 codes of row-major matrices; each block of rows and columns has a scale.
//
// Values do not depend on each other, so the result is the same however a run is cut.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "units.h"

namespace blobstore::BLOBSTORE_TARGET {

// code * scale, rounded to float32, and that to BF16. Every NaN is 0x7fc0; an overflow is infinite.
// A Scale is one float for all codes, or a vector with one for each.
template <typename Code, std::size_t N, typename Scale>
inline void decode_unit(const std::byte* codes, Scale even_scale, Scale odd_scale,
                        std::uint16_t* out) {
  Words<N> even, odd;
  load_codes<Code::bits, N>(codes, even, odd);
  store_unit<Bf16, N>(out, {decoded<Code>(even) * even_scale, decoded<Code>(odd) * odd_scale});
}

// The place in a run of codes, and the scale there; it moves forwards only, through rows and
// matrices.
template <typename Float>
class ScaleWalk {
 public:
  explicit ScaleWalk(const BlocksJob& job)
      : scales_(static_cast<const typename Float::Bits*>(job.scales)),
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
    return Float::decode(std::uint32_t{scales_[row_of_scales_ + column_ / block_cols_]});
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
  const typename Float::Bits* scales_;
  std::size_t rows_, cols_, block_rows_, block_cols_, blocks_, row_, column_, row_of_scales_;
};

// Up to a whole unit of codes with several scales, from the walk's place on.
template <typename Float, typename Code, std::size_t N>
inline void decode_mixed(ScaleWalk<Float>& walk, const std::byte* codes, std::size_t count,
                         std::uint16_t* out) {
  std::uint32_t scales[Unit<N>::size] = {};
  for (std::size_t i = 0; i < count;) {
    const std::size_t size = std::min(walk.left(), count - i);
    std::fill_n(scales + i, size, bits_of(walk.scale()));
    walk.skip(size);
    i += size;
  }
  const Unit<N> unit = load_unit<F32, N>(scales);
  decode_unit<Code, N>(codes, unit.even, unit.odd, out);
}

template <typename Float, typename Code, std::size_t N>
void decode_blocks(const BlocksJob& job) {
  if (job.count == 0) return;
  constexpr std::size_t size = Unit<N>::size;
  ScaleWalk<Float> walk(job);
  std::size_t i = 0;
  while (job.count - i >= size) {
    if (walk.left() < size) {
      decode_mixed<Float, Code, N>(walk, job.codes + i, size, job.out + i);
      i += size;
      continue;
    }
    const float scale = walk.scale();
    const std::size_t end = i + std::min(walk.left(), job.count - i) / size * size;
    walk.skip(end - i);
    for (; i < end; i += size) decode_unit<Code, N>(job.codes + i, scale, scale, job.out + i);
  }
  if (i == job.count) return;
  std::byte rest[size] = {};  // nothing beyond the run is read or written
  std::uint16_t values[size];
  std::memcpy(rest, job.codes + i, job.count - i);
  decode_mixed<Float, Code, N>(walk, rest, job.count - i, values);
  std::memcpy(job.out + i, values, (job.count - i) * sizeof values[0]);
}

}  // namespace blobstore::BLOBSTORE_TARGET
