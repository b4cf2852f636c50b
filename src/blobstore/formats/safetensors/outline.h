// The logical tensors of headers, each with its form: all that its type and shape follow from.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "files.h"

namespace blobstore {

// A logical tensor whose form was not met before: its header, and its name.
struct Example {
  std::size_t file;
  std::string_view name;
};

// The logical tensors of several headers, in columns, in stored order.
//
// Two tensors have one form if their entries have the same dtypes and shapes by suffix, and what
// the metadata say of them is the same. `keys`: of each form, a text that is different for
// different forms. `counts`: the tensors of each header; -1 if the header is missing, or left to
// the rules in Python (stored.py), of which only the grouping is repeated here: a string with an
// escape or of other characters than ASCII, a name or a key twice, a type of a tensor that is not
// there, or of a blob without quantized tensors.
struct Outline {
  std::vector<std::string_view> names;
  std::vector<std::uint32_t> forms;
  std::vector<std::string> keys;
  std::vector<Example> examples;
  std::vector<std::int64_t> counts;
};

// The views in it are of the texts of `headers`.
Outline outline_of(const FileHeaders& headers);

}  // namespace blobstore
