// The small interface between the bindings and the kernels of each target: jobs, and a table of
// functions a target.
#pragma once

#include <cstddef>
#include <cstdint>

namespace blobstore {

enum FloatType : std::size_t { bf16, f16, f32, float_types };
enum QuantType : std::size_t { int4, int8, nvfp4, mxfp4, mxfp8, quant_types };
enum Method : std::size_t { minmax, search, methods };

// The candidates of the search for affine scales (search_affine.h); docs/quantization.md says which
// and why.
struct AffineCandidates {
  const float* factors;  // of the group's range over the levels
  std::size_t factor_count;
  const float* shifts;  // of the codes' range against the group's
  std::size_t shift_count;
  bool neighbours;  // whether the stored values next to the best ones are tried
};

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
};

struct DequantizeJob {
  const std::byte* codes;
  const void* scales;
  const void* biases;
  float global_scale;
  std::size_t count;
  std::size_t group_size;
  void* out;
};

// A block FP8 matrix has a scale for each square of this many rows and columns; those at its edges
// may be cut.
inline constexpr std::size_t fp8_block = 128;

// A flat run of the E4M3 codes of row-major matrices of one shape, which follow each other; so do
// their scales.
struct BlocksJob {
  const std::byte* codes;
  const void* scales;         // those that the run needs, a row for each 128 rows of a matrix
  std::size_t blocks_before;  // blocks of the first row of scales that come before `scales`
  std::size_t count;
  std::size_t rows;
  std::size_t cols;
  std::size_t row;     // of the first code, in its matrix
  std::size_t column;  // of the first code
  std::uint16_t* out;  // BF16
};

inline constexpr std::size_t all_finite = ~std::size_t{0};

// Returns the index of the first non-finite weight, or all_finite.
using Quantize = std::size_t (*)(const QuantizeJob&);
using Dequantize = void (*)(const DequantizeJob&);
using DecodeBlocks = void (*)(const BlocksJob&);

struct Target {
  const char* name;
  Quantize quantize[methods][quant_types][float_types];
  // By the format of the scales and biases (one for the fp types) and that of the output.
  Dequantize dequantize[quant_types][float_types][float_types];
  DecodeBlocks decode_blocks[float_types];  // by the format of the scales
};

extern const Target plain;
extern const Target x86_64_v3;
extern const Target x86_64_v4;
extern const Target neon;

}  // namespace blobstore
