#include "outline.h"

#include <algorithm>
#include <array>
#include <span>
#include <utility>

namespace blobstore {

namespace {

// SUFFIXES of stored.py: the arrays of a quantized tensor.
constexpr std::array<std::string_view, 4> suffixes = {"", ".scale", ".bias", ".global_scale"};
constexpr std::string_view type_key = "quant_type", group_key = "group_size";
// What metadata say of one tensor.
constexpr std::array<std::string_view, 3> described = {".quant_type", ".group_size", ".transposed"};

// Places of strings. A few are searched one by one: a table of three takes longer to make.
class Places {
 public:
  static constexpr std::uint32_t none = ~std::uint32_t{0};

  // False if the string is there already.
  bool add(std::string_view text) {
    const auto place = static_cast<std::uint32_t>(texts_.size());
    if (place < few) {
      if (find(text, "") != none) return false;
    } else {
      if (place == few) {
        for (std::uint32_t one = 0; one < few; ++one) table_.emplace(texts_[one], one);
      }
      if (!table_.emplace(text, place).second) return false;
    }
    texts_.push_back(text);
    return true;
  }

  // The place of a string in two parts, or `none`.
  std::uint32_t find(std::string_view start, std::string_view end) const {
    if (texts_.size() > few) {
      joined_.assign(start).append(end);
      const auto found = table_.find(joined_);
      return found == table_.end() ? none : found->second;
    }
    for (std::uint32_t place = 0; place < texts_.size(); ++place) {
      const std::string_view text = texts_[place];
      if (text.size() == start.size() + end.size() && text.ends_with(end) &&
          text.starts_with(start)) {
        return place;
      }
    }
    return none;
  }

  const std::vector<std::string_view>& texts() const { return texts_; }

  void clear() {
    texts_.clear();
    if (!table_.empty()) table_ = {};  // clearing a large one takes as long as filling it
  }

 private:
  static constexpr std::size_t few = 8;

  std::vector<std::string_view> texts_;
  std::unordered_map<std::string_view, std::uint32_t> table_;
  mutable std::string joined_;
};

bool is_plain(std::string_view text) {
  return std::ranges::none_of(text, [](char one) {
    return one == '\\' || static_cast<unsigned char>(one) >= 0x80;
  });
}

void put(std::string& key, std::uint64_t number) {
  key.append(reinterpret_cast<const char*>(&number), sizeof number);
}

// One header after the other, so that memory is used again. Each step returns false for a header
// that is left to Python.
class Blob {
 public:
  bool read(const FileHeader& header) {
    scan_ = &header.scan;
    names_.clear();
    keys_.clear();
    values_.clear();
    tensors_.clear();
    return is_plain(header.text) && read_names() && read_metadata() && group();
  }

  // The tensors in stored order, without companions.
  const std::vector<std::uint32_t>& tensors() const { return tensors_; }

  std::string_view name(std::uint32_t place) const { return scan_->names[place].raw; }

  void write_key(std::uint32_t place, std::string& key) const {
    key.clear();
    const std::size_t parts = is_scaled(place) ? suffixes.size() : 1;
    for (std::size_t one = 0; one < parts; ++one) {
      if (const auto found = names_.find(name(place), suffixes[one]); found != Places::none) {
        put(key, one);
        write_entry(scan_->tensors.entries[found], key);
      }
    }
    if (keys_.texts().empty()) return;
    for (const std::string_view suffix : described) write_text(name(place), suffix, key);
    write_text(type_key, "", key);
    write_text(group_key, "", key);
  }

 private:
  bool read_names() {
    const auto add = [this](const String& one) { return names_.add(one.raw); };
    return std::ranges::all_of(scan_->names, add);
  }

  bool read_metadata() {
    bool once = true;
    each_pair(scan_->metadata, [&](const String& key, const String& value) {
      once = once && keys_.add(key.raw);
      values_.push_back(value.raw);
    });
    return once && std::ranges::all_of(keys_.texts(), [this](std::string_view key) {
             if (!key.ends_with(described[0])) return true;
             key.remove_suffix(described[0].size());
             return names_.find(key, "") != Places::none;
           });
  }

  bool group() {
    is_companion_.assign(scan_->names.size(), false);
    for (std::uint32_t place = 0; place < scan_->names.size(); ++place) {
      if (!is_scaled(place)) continue;
      for (const std::string_view suffix : std::span(suffixes).subspan(1)) {
        const auto found = names_.find(name(place), suffix);
        if (found != Places::none) is_companion_[found] = true;
      }
    }
    bool any_scaled = false;
    for (std::uint32_t place = 0; place < scan_->names.size(); ++place) {
      if (is_companion_[place]) continue;
      tensors_.push_back(place);
      any_scaled = any_scaled || is_scaled(place);
    }
    const auto begin = [this](std::uint32_t place) { return scan_->tensors.entries[place].begin; };
    if (!std::ranges::is_sorted(tensors_, {}, begin)) {
      std::ranges::stable_sort(tensors_, {}, begin);
    }
    return any_scaled || keys_.find(type_key, "") == Places::none;
  }

  bool is_scaled(std::uint32_t place) const {
    return dtypes[scan_->tensors.entries[place].dtype].name == "U32" &&
           names_.find(name(place), suffixes[1]) != Places::none;
  }

  void write_entry(const Entry& entry, std::string& key) const {
    put(key, entry.dtype);
    put(key, entry.rank);
    for (unsigned axis = 0; axis < entry.rank; ++axis) {
      put(key, scan_->tensors.dims[entry.first_dim + axis]);
    }
  }

  // A value of the metadata, or that there is none.
  void write_text(std::string_view start, std::string_view end, std::string& key) const {
    const auto found = keys_.find(start, end);
    put(key, found == Places::none ? 0 : 1 + values_[found].size());
    if (found != Places::none) key.append(values_[found]);
  }

  const Scan* scan_ = nullptr;
  Places names_, keys_;
  std::vector<std::string_view> values_;
  std::vector<std::uint32_t> tensors_;
  std::vector<bool> is_companion_;
};

}  // namespace

Outline outline_of(const FileHeaders& headers) {
  Outline outline;
  outline.counts.reserve(headers.each.size());
  std::unordered_map<std::string, std::uint32_t> forms;
  std::string key;
  Blob blob;
  for (std::size_t file = 0; file < headers.each.size(); ++file) {
    if (!headers.each[file] || !blob.read(*headers.each[file])) {
      outline.counts.push_back(-1);
      continue;
    }
    for (const std::uint32_t place : blob.tensors()) {
      blob.write_key(place, key);
      const auto next = static_cast<std::uint32_t>(outline.keys.size());
      const auto [found, is_new] = forms.try_emplace(key, next);
      if (is_new) {
        outline.keys.push_back(key);
        outline.examples.push_back({file, blob.name(place)});
      }
      outline.names.push_back(blob.name(place));
      outline.forms.push_back(found->second);
    }
    outline.counts.push_back(static_cast<std::int64_t>(blob.tensors().size()));
  }
  return outline;
}

}  // namespace blobstore
