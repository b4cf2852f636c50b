// Prints one line a target of this build: its name, and a hash of all that it makes of fixed pseudo-random weights, by
// every method, type, group size and float format, and of block FP8. Equal hashes mean equal bits; NaN counts as one value.
#include "comparison.h"
#include "kernels.h"
#include "processor.h"

#include <bit>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace blobstore;

namespace {

constexpr std::size_t count = 128 * 301;  // of no group size a multiple of any number of lanes
constexpr std::size_t columns = 256;
constexpr std::size_t fp8_block = 128;

struct Random {
  std::uint64_t state = 88172645463325252u;
  std::uint32_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<std::uint32_t>(state >> 16);
  }
};

struct Hash {
  std::uint64_t value = 1469598103934665603u;
  void add(std::uint64_t number) { value = (value ^ number) * 1099511628211u; }
  template <typename T>
  void add_all(const T* numbers, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) add(numbers[i]);
  }
};

std::uint32_t infinity_of(std::size_t format) { return format == f32 ? 0x7f800000u : format == bf16 ? 0x7f80u : 0x7c00u; }

// Finite weights: of any exponent, or (when alike) of exponents within 2^16 of one another.
std::vector<std::byte> weights_of(std::size_t format, bool alike, Random& random) {
  const unsigned bits = 8 * item_size(format);
  const std::uint32_t infinity = infinity_of(format);
  const std::uint32_t step = infinity & (~infinity + 1);
  std::vector<std::byte> weights(count * item_size(format));
  for (std::size_t i = 0; i < count; ++i) {
    std::uint32_t value = random.next() & (bits == 32 ? ~0u : 0xffffu);
    if (alike) value = (value & ~infinity) | ((infinity / step / 2 - 12 + random.next() % 16) * step);
    if ((value & infinity) == infinity) value &= ~step;
    for (std::size_t byte = 0; byte < item_size(format); ++byte) {
      weights[i * item_size(format) + byte] = static_cast<std::byte>(value >> (8 * byte));
    }
  }
  return weights;
}

void add_dequantized(Hash& hash, const Target& target, std::size_t type, DequantizeJob job) {
  for (const std::size_t out : {bf16, f16, f32}) {
    const auto kernel = target.dequantize[type][out];
    std::vector<std::uint32_t> wide(out == f32 ? count : 0);
    std::vector<std::uint16_t> narrow(out == f32 ? 0 : count);
    job.out = out == f32 ? static_cast<void*>(wide.data()) : narrow.data();
    kernel(job);
    const std::uint32_t infinity = infinity_of(out);
    for (const std::uint32_t value : wide) hash.add((value & 0x7fffffffu) > infinity ? 1 : value);
    for (const std::uint16_t value : narrow) hash.add((value & 0x7fffu) > infinity ? 1 : value);
  }
}

// Whether weight `at` is the first of a group with an infinite scale: of finite weights, only such a group is at fault.
bool starts_infinite_group(const QuantizeJob& job, std::size_t type, std::size_t format, std::size_t at) {
  std::uint32_t scale = 0;  // little-endian
  const auto* const scales = static_cast<const std::byte*>(job.scales);
  std::memcpy(&scale, scales + at / job.group_size * item_size(format), item_size(format));
  return type <= int8 && at % job.group_size == 0 && (scale & infinity_of(format)) == infinity_of(format);
}

void add_quantized(Hash& hash, const Target& target, std::size_t format, const std::vector<std::byte>& weights,
                   const std::vector<float>& importance) {
  const std::vector<float> factors = {0.80f, 0.852f, 0.904f, 0.956f, 1.008f, 1.06f};
  const std::vector<float> shifts = {-0.5f, -0.25f, 0.0f, 0.25f, 0.5f};
  for (std::size_t type = 0; type < quant_types; ++type) {
    const std::vector<std::size_t> sizes = type <= int8 ? std::vector<std::size_t>{32, 64, 128}
                                                        : std::vector<std::size_t>{type == nvfp4 ? 16u : 32u};
    for (const std::size_t group_size : sizes) {
      for (std::size_t run = 0; run < 3; ++run) {  // minmax, search, search with importance
        const float global_scale = type == nvfp4 ? 0.25f : 1.0f;
        const Method how = run == 0 ? minmax : search;
        std::vector<std::byte> codes(count), scales(count / 4), biases(count / 4);
        const QuantizeJob job{weights.data(), count, group_size, codes.data(), scales.data(), biases.data(), global_scale,
                              run == 2 ? importance.data() : nullptr, columns, 16,
                              {factors.data(), factors.size(), shifts.data(), shifts.size(), true}, plain.quantize[how][type][format]};
        const std::size_t bad = target.quantize[how][type][format](job);
        if (bad != all_finite && !starts_infinite_group(job, type, format, bad)) std::printf("not finite\n");
        hash.add(bad);
        for (const auto* part : {&codes, &scales, &biases}) {
          hash.add_all(reinterpret_cast<const unsigned char*>(part->data()), part->size());
        }
        add_dequantized(hash, target, type,
                        {codes.data(), scales.data(), biases.data(), format, global_scale, count, group_size, nullptr});
      }
    }
  }
}

void add_sums(Hash& hash, const Comparison& found) {
  for (const double sum : {found.squared_error, found.squared_weight, found.squared_read, found.product, found.max_error}) {
    hash.add(sum != sum ? 1 : std::bit_cast<std::uint64_t>(sum));
  }
  hash.add(found.beyond);
}

// Weights against others of every format, and against codes and scales of any bits.
void add_compared(Hash& hash, const Target& target, std::size_t format, const std::vector<std::byte>& weights, Random& random) {
  const std::size_t most = weights.size() / 8;
  for (const std::size_t read : {bf16, f16, f32, f64}) {
    for (const std::size_t size : {std::size_t{0}, std::size_t{7}, std::size_t{8}, std::size_t{1025}, most}) {
      add_sums(hash, compare(target, {weights.data(), format, size - (size == most), weights.data() + 8, read, {}, {}}));
    }
  }
  std::vector<std::byte> codes(most), scales(most), biases(most);
  for (auto* part : {&codes, &scales, &biases}) {
    for (std::byte& octet : *part) octet = static_cast<std::byte>(random.next());
  }
  for (std::size_t type = 0; type < quant_types; ++type) {
    const std::size_t group_size = type <= int8 ? 64 : type == nvfp4 ? 16 : 32;
    for (const std::size_t groups : {1, 2, 17, 70}) {
      const DequantizeJob stored{codes.data(), scales.data(), biases.data(), bf16, 0.75f, groups * group_size, group_size, nullptr};
      add_sums(hash, compare(target, {weights.data(), format, stored.count, nullptr, {}, type, stored}));
    }
  }
}

// Runs of matrices whose scales have any bits, from somewhere in the first two to the end. NaN has bits of its own here.
void add_decoded(Hash& hash, const Target& target, std::size_t rows, std::size_t cols, Random& random) {
  const std::size_t matrices = count / (rows * cols);
  const std::size_t blocks = (cols - 1) / fp8_block + 1, rows_of_blocks = (rows - 1) / fp8_block + 1;
  std::vector<std::byte> codes(matrices * rows * cols);
  for (std::byte& code : codes) code = static_cast<std::byte>(random.next());
  std::vector<float> scales(matrices * rows_of_blocks * blocks), values(16);
  for (std::vector<float>* floats : {&scales, &values}) {
    for (float& one : *floats) one = std::bit_cast<float>(random.next());
  }
  for (std::size_t code = 0; code < block_codes; ++code) {
    for (const std::size_t first : {std::size_t{0}, std::size_t{1}, cols - 1, rows * cols, 130 * cols + 7}) {
      if (first >= codes.size()) continue;
      const std::size_t row = first / cols, column = first % cols;
      const std::size_t begin = (row / rows * rows_of_blocks + row % rows / fp8_block) * blocks + column / fp8_block;
      std::vector<std::uint16_t> out(codes.size() - first);
      target.decode_blocks[code][bf16]({codes.data() + first, values.data(), scales.data() + begin, column / fp8_block,
                                        out.size(), rows, cols, fp8_block, fp8_block, row % rows, column, out.data()});
      hash.add_all(out.data(), out.size());
    }
  }
}

}  // namespace

int main() {
  for (const Target* target : targets) {
    if (!runs_here(*target)) continue;
    Random random;
    Hash hash;
    std::vector<float> importance(columns);
    for (float& value : importance) value = static_cast<float>(random.next() % 1000) / 512.0f;
    for (const std::size_t format : {bf16, f16, f32}) {
      for (const bool alike : {true, false}) {
        const std::vector<std::byte> weights = weights_of(format, alike, random);
        add_quantized(hash, *target, format, weights, importance);
        add_compared(hash, *target, format, weights, random);
      }
    }
    for (const std::size_t cols : {1, 2, 33, 100, 128, 250}) {
      for (const std::size_t rows : {std::size_t{1}, std::size_t{2}, std::size_t{4}, std::size_t{130}}) {
        add_decoded(hash, *target, rows, cols, random);
      }
    }
    std::printf("%s %016" PRIx64 "\n", target->name, hash.value);
  }
}
