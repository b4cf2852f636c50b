// The small interface between the bindings and the kernels of each target: jobs, and a table of
// functions a target.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blobstore {

enum FloatType : std::size_t { bf16, f16, f32, float_types, f64 = float_types, wide_types };
enum QuantType : std::size_t { int4, int8, nvfp4, mxfp4, mxfp8, quant_types };
enum BlockCode : std::size_t { e4m3, e5m2, i8, table, block_codes };
enum Method : std::size_t { minmax, search, methods };

inline std::size_t item_size(std::size_t float_type) {
  return float_type == f64 ? 8 : float_type == f32 ? 4 : 2;
}
inline bool is_affine(std::size_t type) { return type == int4 || type == int8; }
inline std::size_t bits_of(std::size_t type) { return type == int8 || type == mxfp8 ? 8 : 4; }

// The candidates of the search for affine scales (search_affine.h); docs/quantization.md says which
// and why.
struct AffineCandidates {
  const float* factors;  // of the group's range over the levels
  std::size_t factor_count;
  const float* shifts;  // of the codes' range against the group's
  std::size_t shift_count;
  bool neighbours;  // whether the stored values next to the best ones are tried
};

struct QuantizeJob;
// Returns the index of the first non-finite weight, and then the outputs are unspecified; else of the
// first weight of the first group whose scale is infinite; else all_finite.
using Quantize = std::size_t (*)(const QuantizeJob&);

// Whole groups of a flat run of weights.
struct QuantizeJob {
  const void* weights;
  std::size_t count;
  std::size_t group_size;
  std::byte* codes;
  void* scales;
  void* biases;             // affine types only
  float global_scale;       // nvfp4 only: a power of two
  const float* importance;  // search only: one value >= 0 a column, or null
  std::size_t columns;
  std::size_t first_column;  // of the first weight
  AffineCandidates candidates;
  Quantize plain;  // the plain target's kernel, for the last groups, fewer than a target's lanes
};

struct DequantizeJob {
  const std::byte* codes;
  const void* scales;
  const void* biases;
  std::size_t scale_type;  // of scales and biases; affine types only
  float global_scale;
  std::size_t count;
  std::size_t group_size;
  void* out;
};

// A flat run of codes of row-major matrices of one shape, which follow each other; so do
// their scales: one for each block of rows and columns. Blocks at the edges may be cut.
struct BlocksJob {
  const std::byte* codes;
  const float* values;        // of the 16 codes of a table, else null
  const float* scales;        // those that the run needs, a row for each row of blocks
  std::size_t blocks_before;  // blocks of the first row of scales that come before `scales`
  std::size_t count;
  std::size_t rows;
  std::size_t cols;
  std::size_t block_rows;  // of the codes that share a scale
  std::size_t block_cols;
  std::size_t row;     // of the first code, in its matrix
  std::size_t column;  // of the first code
  void* out;
};

// Rows of codes of one byte; `group_of` says which scale and bias (or zero point) a column has.
struct ColumnsJob {
  std::size_t rows, cols, groups, stride;  // the last of a row of codes
  const std::uint8_t* codes;
  const std::int32_t* group_of;
  const float *scales, *biases;  // [rows, groups]
  bool by_zero;
  void* out;
};

// Sums over weights `w` and what they are read back as, `r`; `max_error` ignores NaN.
struct Comparison {
  double squared_error;   // of (r - w)^2
  double squared_weight;  // of w^2
  double squared_read;    // of r^2
  double product;         // of w * r
  double max_error;       // the largest |r - w|
  std::size_t beyond;     // how many w lie half a step or more beyond the codes of their group
};

inline constexpr std::size_t sum_lanes = 8;
struct Sums {
  double squared_error[sum_lanes], squared_weight[sum_lanes], squared_read[sum_lanes],
      product[sum_lanes], max_error[sum_lanes], beyond[sum_lanes];
};

inline constexpr std::size_t all_finite = ~std::size_t{0};

using Dequantize = void (*)(const DequantizeJob&);
// Writes the ends of each group's range: weights at most `low` or at least `high` are beyond it.
using Limits = void (*)(const DequantizeJob&, double* low, double* high);
// Exactly.
using ToDoubles = void (*)(const void* from, std::size_t count, double* to);
// Adds groups of pairs to sums, each pair to lane `index % sum_lanes`. `low` and `high` are the
// ranges of the groups, or null: no weight is beyond.
using AddPairs = void (*)(const double* weights, const double* read, std::size_t count,
                          std::size_t group_size, const double* low, const double* high,
                          Sums& sums);
using DecodeBlocks = void (*)(const BlocksJob&);
using DequantizeColumns = void (*)(const ColumnsJob&);

struct Target {
  const char* name;
  Quantize quantize[methods][quant_types][float_types];
  Dequantize dequantize[quant_types][float_types];  // by the format of the output
  DecodeBlocks decode_blocks[block_codes][float_types];  // by the codes and the format of the output
  DequantizeColumns dequantize_columns[float_types];  // by the format of the output
  ToDoubles to_doubles[wide_types];
  AddPairs add_pairs;
  Limits limits[quant_types];  // of `plain` only
};

extern const Target plain;
extern const Target x86_64_v3;
extern const Target x86_64_v4;
extern const Target neon;

}  // namespace blobstore
