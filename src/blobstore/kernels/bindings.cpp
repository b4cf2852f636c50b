// Python bindings of the kernels: shapes and sizes are checked here, arithmetic is not done here.
//
// Weights, scales and biases cross as arrays of their bit patterns (uint16 for BF16 and F16, uint32
// for F32), because numpy has no BF16 of its own, and each call names their format. The interpreter
// lock is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "comparison.h"
#include "kernels.h"
#include "processor.h"
#include "turn.h"

namespace nb = nanobind;
using namespace blobstore;

namespace {

// An array of any item size, read or written as its bytes.
using In = nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Out = nb::ndarray<nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<std::uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Octets = nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Lines = nb::ndarray<const std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<std::uint32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Codes = nb::ndarray<const std::uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Indexes = nb::ndarray<const std::int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void require(bool condition, const char* message) {
  if (!condition) throw std::invalid_argument(message);
}

template <std::size_t count>
std::size_t index_of(std::string_view name, const std::string_view (&names)[count]) {
  const auto* found = std::find(names, names + count, name);
  require(found != names + count, "unknown name");
  return static_cast<std::size_t>(found - names);
}
constexpr std::string_view float_names[] = {"BF16", "F16", "F32"};
constexpr std::string_view wide_names[] = {"BF16", "F16", "F32", "F64"};
constexpr std::string_view type_names[] = {"int4", "int8", "nvfp4", "mxfp4", "mxfp8"};
constexpr std::string_view code_names[] = {"F8_E4M3", "F8_E5M2", "I8", "U8"};
constexpr std::string_view method_names[] = {"minmax", "search"};

const Target& target_of(std::string_view name) {
  for (const Target* target : targets) {
    if (name == target->name && runs_here(*target)) return *target;
  }
  throw std::invalid_argument("unknown target");
}

void require_items(const auto& array, std::size_t count, std::size_t size, const char* message) {
  require(array.size() == count && array.itemsize() == size, message);
}

bool has_group_size(std::size_t type, std::size_t size) {
  return is_affine(type) ? size == 32 || size == 64 || size == 128
                         : size == (type == nvfp4 ? 16u : 32u);
}

// The sizes of a quantized run of `count` weights; scales and biases are in `scale_type`, bytes for
// the fp types.
void require_parts(std::size_t count, std::size_t type, std::size_t group_size,
                   std::size_t scale_type, const auto& words, const auto& scales,
                   const auto& biases) {
  const bool affine = is_affine(type);
  require(has_group_size(type, group_size), "the type does not have that group_size");
  require(count % group_size == 0, "weights are not a whole number of groups");
  require_items(words, count * bits_of(type) / 32, 4, "words has the wrong size");
  const std::size_t scale_size = affine ? item_size(scale_type) : 1;
  require_items(scales, count / group_size, scale_size, "scales has the wrong size");
  require(biases.has_value() == affine, "only affine types have biases");
  if (affine) require_items(*biases, scales.size(), scale_size, "biases has the wrong size");
}

// The index that the kernel returns, or -1 for all_finite.
std::int64_t quantize(std::string_view target, std::string_view method, std::string_view quant_type,
                      std::string_view float_type, In weights, std::size_t group_size, Words words,
                      Out scales, std::optional<Out> biases, float global_scale,
                      std::optional<Floats> importance, std::size_t first_column,
                      const std::vector<float>& factors, const std::vector<float>& shifts,
                      bool neighbours) {
  const std::size_t type = index_of(quant_type, type_names);
  const std::size_t format = index_of(float_type, float_names);
  require(weights.itemsize() == item_size(format), "weights has the wrong size");
  require_parts(weights.size(), type, group_size, format, words, scales, biases);
  const std::size_t how = index_of(method, method_names);
  const auto kernel = target_of(target).quantize[how][type][format];
  const QuantizeJob job{
      .weights = weights.data(),
      .count = weights.size(),
      .group_size = group_size,
      .codes = reinterpret_cast<std::byte*>(words.data()),
      .scales = scales.data(),
      .biases = biases ? biases->data() : nullptr,
      .global_scale = global_scale,
      .importance = importance && importance->size() ? importance->data() : nullptr,
      .columns = importance ? importance->size() : 0,
      .first_column = first_column,
      .candidates = {factors.data(), factors.size(), shifts.data(), shifts.size(), neighbours},
      .plain = plain.quantize[how][type][format],
  };
  const nb::gil_scoped_release unlocked;
  const std::size_t bad = kernel(job);
  return bad == all_finite ? -1 : static_cast<std::int64_t>(bad);
}

void dequantize(std::string_view target, std::string_view quant_type, std::string_view scale_type,
                std::string_view out_type, In words, In scales, std::optional<In> biases,
                std::size_t group_size, float global_scale, Out out) {
  const std::size_t type = index_of(quant_type, type_names);
  const std::size_t from = index_of(scale_type, float_names);
  const std::size_t to = index_of(out_type, float_names);
  require(out.itemsize() == item_size(to), "out has the wrong size");
  require_parts(out.size(), type, group_size, from, words, scales, biases);
  const auto kernel = target_of(target).dequantize[type][to];
  const DequantizeJob job{
      .codes = static_cast<const std::byte*>(words.data()),
      .scales = scales.data(),
      .biases = biases ? biases->data() : nullptr,
      .scale_type = from,
      .global_scale = global_scale,
      .count = out.size(),
      .group_size = group_size,
      .out = out.data(),
  };
  const nb::gil_scoped_release unlocked;
  kernel(job);
}

// How many scales a run of codes of consecutive matrices needs, and how many come before those in
// their row of scales. A run within one row needs those of its blocks, others whole rows
// (scales.py, `BlockRun`).
struct RunOfScales {
  std::size_t before, count;
};
RunOfScales scales_of(std::size_t first, std::size_t count, std::size_t rows, std::size_t cols,
                      std::size_t block_rows, std::size_t block_cols) {
  const std::size_t blocks = (cols - 1) / block_cols + 1;
  const auto row_of_scales = [&](std::size_t row) {
    return row / rows * ((rows - 1) / block_rows + 1) + row % rows / block_rows;
  };
  if (count == 0) return {0, 0};
  const std::size_t last = first + count - 1;
  if (first / cols == last / cols) {
    const std::size_t before = first % cols / block_cols;
    return {before, last % cols / block_cols + 1 - before};
  }
  return {0, (row_of_scales(last / cols) + 1 - row_of_scales(first / cols)) * blocks};
}

void decode_blocks(std::string_view target, std::string_view code, std::string_view out_type,
                   Octets codes, std::optional<Floats> values, Floats scales, std::size_t first,
                   std::size_t rows, std::size_t cols, std::size_t block_rows,
                   std::size_t block_cols, Out out) {
  const std::size_t type = index_of(code, code_names), format = index_of(out_type, float_names);
  const auto kernel = target_of(target).decode_blocks[type][format];
  const std::size_t count = out.size(), bits = type == table ? 4 : 8;
  require(out.itemsize() == item_size(format), "out has the wrong size");
  require(codes.size() == (count * bits + 7) / 8, "codes has the wrong size");
  require((values ? values->size() : 0) == (type == table ? 16 : 0), "a table has 16 values");
  require(rows > 0 && cols > 0, "the matrices are empty");
  require(block_rows > 0 && block_cols > 0, "the blocks are empty");
  require(first <= SIZE_MAX - count, "the run is too long");
  const RunOfScales needed = scales_of(first, count, rows, cols, block_rows, block_cols);
  require(scales.size() == needed.count, "scales has the wrong size");
  const BlocksJob job{
      .codes = reinterpret_cast<const std::byte*>(codes.data()),
      .values = values ? values->data() : nullptr,
      .scales = scales.data(),
      .blocks_before = needed.before,
      .count = count,
      .rows = rows,
      .cols = cols,
      .block_rows = block_rows,
      .block_cols = block_cols,
      .row = first / cols % rows,
      .column = first % cols,
      .out = out.data(),
  };
  const nb::gil_scoped_release unlocked;
  kernel(job);
}

void dequantize_columns(std::string_view target, std::string_view out_type, Codes codes,
                        Indexes group_of, Matrix scales, Matrix biases, bool by_zero, Out out) {
  const std::size_t format = index_of(out_type, float_names);
  const std::size_t rows = codes.shape(0), cols = group_of.size(), groups = scales.shape(1);
  require(scales.shape(0) == rows && biases.shape(0) == rows && biases.shape(1) == groups,
          "scales or biases have the wrong size");
  require(codes.shape(1) >= cols, "codes has the wrong size");
  require_items(out, rows * cols, item_size(format), "out has the wrong size");
  for (std::size_t i = 0; i < cols; ++i) {
    require(static_cast<std::size_t>(group_of.data()[i]) < groups, "a column has no group");
  }
  const ColumnsJob job{rows,          cols,          groups,  codes.shape(1), codes.data(),
                       group_of.data(), scales.data(), biases.data(), by_zero, out.data()};
  const nb::gil_scoped_release unlocked;
  target_of(target).dequantize_columns[format](job);
}

nb::tuple sums_of(const Target& target, const CompareJob& job) {
  Comparison found;
  {
    const nb::gil_scoped_release unlocked;
    found = compare(target, job);
  }
  return nb::make_tuple(found.squared_error, found.squared_weight, found.squared_read,
                        found.product, found.max_error, found.beyond);
}

nb::tuple compare_floats(std::string_view target, std::string_view float_type,
                         std::string_view read_type, In weights, In read) {
  const std::size_t from = index_of(float_type, wide_names);
  const std::size_t to = index_of(read_type, wide_names);
  require(weights.itemsize() == item_size(from), "weights has the wrong size");
  require_items(read, weights.size(), item_size(to), "read has the wrong size");
  return sums_of(target_of(target),
                 {.weights = weights.data(), .float_type = from, .count = weights.size(),
                  .read = read.data(), .read_type = to, .quant_type = {}, .stored = {}});
}

nb::tuple compare_stored(std::string_view target, std::string_view float_type,
                         std::string_view quant_type, std::string_view scale_type, In weights,
                         In words, In scales, std::optional<In> biases, std::size_t group_size,
                         float global_scale) {
  const std::size_t type = index_of(quant_type, type_names);
  const std::size_t format = index_of(float_type, wide_names);
  const std::size_t stored = index_of(scale_type, float_names);
  require(weights.itemsize() == item_size(format), "weights has the wrong size");
  require_parts(weights.size(), type, group_size, stored, words, scales, biases);
  const DequantizeJob codes{
      .codes = static_cast<const std::byte*>(words.data()),
      .scales = scales.data(),
      .biases = biases ? biases->data() : nullptr,
      .scale_type = stored,
      .global_scale = global_scale,
      .count = weights.size(),
      .group_size = group_size,
      .out = nullptr,
  };
  return sums_of(target_of(target),
                 {.weights = weights.data(), .float_type = format, .count = weights.size(),
                  .read = nullptr, .read_type = {}, .quant_type = type, .stored = codes});
}

void turn(Lines lines, std::size_t square, Rows rows) {
  require(square == 1 || square == 8, "codes have 4 bits, or none are turned");
  const std::size_t count = lines.shape(0), width = lines.shape(1);
  require(rows.shape(0) == width * square && rows.shape(1) == (count + square - 1) / square,
          "rows has the wrong size");
  const nb::gil_scoped_release unlocked;
  (square == 1 ? turn_words<1> : turn_words<8>)(lines.data(), count, width, rows.data());
}

void widen(Lines words, unsigned bits, unsigned used, unsigned wide, Rows rows) {
  require(wide == 4 || wide == 8, "codes get 4 or 8 bits");
  require(bits > 0 && bits <= wide && used >= 32 / wide * bits && used <= 32, "unknown layout");
  require(rows.shape(0) == words.shape(0), "rows has the wrong size");
  const std::size_t count = words.shape(1), size = rows.shape(1);
  const nb::gil_scoped_release unlocked;
  for (std::size_t row = 0; row < words.shape(0); ++row) {
    (wide == 4 ? widen_row<4> : widen_row<8>)(words.data() + row * count, count, bits, used,
                                              rows.data() + row * size, size);
  }
}

nb::list available() {
  nb::list names;
  for (const Target* target : targets) {
    if (runs_here(*target)) names.append(target->name);
  }
  return names;
}

}  // namespace

NB_MODULE(_native, m) {
  using nb::arg;
  m.def("targets", &available);
  m.def("quantize", &quantize, arg("target"), arg("method"), arg("quant_type"), arg("float_type"),
        arg("weights").noconvert(), arg("group_size"), arg("words").noconvert(),
        arg("scales").noconvert(), arg("biases").noconvert().none(), arg("global_scale"),
        arg("importance").noconvert().none(), arg("first_column"), arg("factors"), arg("shifts"),
        arg("neighbours"));
  m.def("dequantize", &dequantize, arg("target"), arg("quant_type"), arg("scale_type"),
        arg("out_type"), arg("words").noconvert(), arg("scales").noconvert(),
        arg("biases").noconvert().none(), arg("group_size"), arg("global_scale"),
        arg("out").noconvert());
  m.def("decode_blocks", &decode_blocks, arg("target"), arg("code"), arg("out_type"),
        arg("codes").noconvert(), arg("values").noconvert().none(), arg("scales").noconvert(),
        arg("first"), arg("rows"), arg("cols"), arg("block_rows"), arg("block_cols"),
        arg("out").noconvert());
  m.def("dequantize_columns", &dequantize_columns, arg("target"), arg("out_type"),
        arg("codes").noconvert(), arg("group_of").noconvert(), arg("scales").noconvert(),
        arg("biases").noconvert(), arg("by_zero"), arg("out").noconvert());
  m.def("widen", &widen, arg("words").noconvert(), arg("bits"), arg("used"), arg("wide"),
        arg("rows").noconvert());
  m.def("turn", &turn, arg("lines").noconvert(), arg("square"), arg("rows").noconvert());
  m.def("compare", &compare_floats, arg("target"), arg("float_type"), arg("read_type"),
        arg("weights").noconvert(), arg("read").noconvert());
  m.def("compare_stored", &compare_stored, arg("target"), arg("float_type"), arg("quant_type"),
        arg("scale_type"), arg("weights").noconvert(), arg("words").noconvert(),
        arg("scales").noconvert(), arg("biases").noconvert().none(), arg("group_size"),
        arg("global_scale"));
}
