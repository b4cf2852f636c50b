#include "scan.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <numeric>
#include <tuple>
#include <utility>

namespace blobstore {

constexpr std::size_t few_tensors = 4;

bool Tensors::fits(const Entry& entry) const {
  std::uint64_t bits = dtypes[entry.dtype].bits;
  bool empty = false;
  for (unsigned axis = 0; axis < entry.rank; ++axis) {
    const std::uint64_t dim = dims[entry.first_dim + axis];
    empty = empty || dim == 0;
    if (dim != 0 && __builtin_mul_overflow(bits, dim, &bits)) return false;
  }
  if (empty) bits = 0;
  return entry.begin <= entry.end && bits % 8 == 0 && bits / 8 == entry.end - entry.begin;
}

bool Tensors::cover(std::optional<std::uint64_t> data_size) const {
  const auto range = [this](std::uint32_t index) {
    return std::tuple(entries[index].begin, entries[index].end);
  };
  // Most files are written in the order of their data.
  std::uint64_t expected = 0;
  const auto follows = [&](const Entry& entry) {
    return entry.begin == std::exchange(expected, entry.end);
  };
  if (!std::ranges::all_of(entries, follows)) {
    std::vector<std::uint32_t> order(entries.size());
    std::iota(order.begin(), order.end(), 0);
    std::ranges::sort(order, {}, range);
    expected = 0;
    for (const std::uint32_t index : order) {
      if (!follows(entries[index])) return false;
    }
  }
  return !data_size || *data_size == expected;
}

namespace {

// Every step returns whether the text goes on as it has to; false ends the scan.
//
// The text ends in a NUL that does not count, as Python's bytes do: no JSON goes on over it, so no
// step checks for the end.
class JsonScanner {
 public:
  explicit JsonScanner(std::string_view text) : at_(text.data()) {}

  const char* at() const { return at_; }

  bool take(char wanted) {
    if (*at_ != wanted) return false;
    ++at_;
    return true;
  }

  void skip_space() {
    while (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r') ++at_;
  }

  // An object, or an array: `one` reads each of its values (of an object: with its key).
  template <char open = '{', char close = '}'>
  bool members(auto one) {
    if (!take(open)) return false;
    skip_space();
    if (take(close)) return true;
    do {
      skip_space();
      if (!one()) return false;
      skip_space();
    } while (take(','));
    return take(close);
  }

  // The caller decodes the contents.
  bool string(String& value) {
    if (!take('"')) return false;
    const char* const begin = at_;
    value.escaped = false;
    while (*at_ != '"') {
      if (*at_ == '\\') {
        value.escaped = true;
        ++at_;
      }
      if (static_cast<unsigned char>(*at_) < ' ') return false;
      ++at_;
    }
    value.raw = {begin, at_};
    ++at_;
    return true;
  }

  bool key(String& value) {
    if (!string(value)) return false;
    skip_space();
    if (!take(':')) return false;
    skip_space();
    return true;
  }

  // The caller checks what follows the digits: after "01" or "1.0" it finds neither comma nor
  // bracket.
  bool number(std::uint64_t& value) {
    value = 0;
    if (take('0')) return true;
    if (*at_ < '1' || *at_ > '9') return false;
    for (; *at_ >= '0' && *at_ <= '9'; ++at_) {
      if (__builtin_mul_overflow(value, std::uint64_t{10}, &value)) return false;
      const auto digit = static_cast<std::uint64_t>(*at_ - '0');
      if (__builtin_add_overflow(value, digit, &value)) return false;
    }
    return true;
  }

 private:
  const char* at_;
};

class Scanner : JsonScanner {
 public:
  Scanner(std::string_view text, Scan& found)
      : JsonScanner(text), end_(text.data() + text.size()), found_(found) {}

  // An object of strings.
  bool strings(auto one) {
    const auto pair = [&, this] {
      String name, value;
      if (!key(name) || !string(value)) return false;
      one(name, value);
      return true;
    };
    return members(pair);
  }

  bool header() {
    if (!members([this] { return member(); })) return false;
    while (take(' ')) {
    }
    return at() == end_;
  }

 private:
  bool member() {
    String name;
    if (!key(name)) return false;
    if (name.raw == "__metadata__") return metadata();
    if (name.raw.size() > most_name_bytes) return false;
    Entry entry{};
    if (!tensor(entry)) return false;
    found_.names.push_back(name);
    found_.tensors.entries.push_back(entry);
    return true;
  }

  bool metadata() {
    const char* const begin = at();
    if (!found_.metadata.empty() || !strings([](String, String) {})) return false;
    found_.metadata = {begin, at()};
    return true;
  }

  bool tensor(Entry& entry) {
    unsigned seen = 0;
    const auto field = [&, this] {
      String name;
      if (!key(name)) return false;
      const unsigned bit =
          name.raw == "dtype" ? 1 : name.raw == "shape" ? 2 : name.raw == "data_offsets" ? 4 : 0;
      if (bit == 0 || (seen & bit) != 0) return false;
      seen |= bit;
      return bit == 1 ? dtype(entry) : bit == 2 ? shape(entry) : offsets(entry);
    };
    return members(field) && seen == 7 && found_.tensors.fits(entry);
  }

  bool dtype(Entry& entry) {
    String name;
    if (!string(name)) return false;
    const auto* const found = std::ranges::find(dtypes, name.raw, &DType::name);
    entry.dtype = static_cast<std::uint8_t>(found - std::begin(dtypes));
    return found != std::end(dtypes);
  }

  bool shape(Entry& entry) {
    entry.first_dim = static_cast<std::uint32_t>(found_.tensors.dims.size());
    const auto dim = [&, this] {
      if (entry.rank++ == most_rank) return false;
      return number(found_.tensors.dims.emplace_back());
    };
    return members<'[', ']'>(dim);
  }

  bool offsets(Entry& entry) {
    unsigned count = 0;
    const auto one = [&, this] {
      return count < 2 && number(count++ == 0 ? entry.begin : entry.end);
    };
    return members<'[', ']'>(one) && count == 2;
  }

  const char* const end_;
  Scan& found_;
};

}  // namespace

void each_pair(std::string_view metadata, const std::function<void(String, String)>& pair) {
  Scan unused;
  if (!metadata.empty()) Scanner(metadata, unused).strings(pair);
}

std::optional<Scan> scan(std::string_view text, std::optional<std::uint64_t> data_size,
                         std::pmr::memory_resource* memory) {
  std::optional<Scan> result;
  Scan& found = result.emplace(std::pmr::vector<String>(memory),
                               Tensors{std::pmr::vector<Entry>(memory),
                                       std::pmr::vector<std::uint64_t>(memory)},
                               std::string_view());
  // Entry counts dimensions in 32 bits.
  if (text.size() > std::numeric_limits<std::uint32_t>::max()) return {};
  // Most headers have one quantized tensor, for which the vectors would grow several times.
  found.names.reserve(few_tensors);
  found.tensors.entries.reserve(few_tensors);
  found.tensors.dims.reserve(2 * few_tensors);
  if (!Scanner(text, found).header() || !found.tensors.cover(data_size)) return {};
  if (found.names.size() > few_tensors) {
    found.tensors.entries.shrink_to_fit();
    found.tensors.dims.shrink_to_fit();
  }
  return result;
}

}  // namespace blobstore
