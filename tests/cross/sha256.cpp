// Every method of SHA-256 that this processor has, on streams of many lengths: prints a line for
// each method, with the words of all states in hex.
#include "choice.h"

#include <cstdio>
#include <cstring>
#include <vector>

using namespace blobstore::hashing;

int main() {
  constexpr std::size_t streams = 20;
  std::vector<std::vector<std::uint8_t>> data(streams);
  std::uint32_t number = 1;
  for (std::size_t i = 0; i < streams; ++i) {
    data[i].resize(i * 5 % 23 * block_size);
    for (auto& byte : data[i]) {
      number = number * 1664525 + 1013904223;
      byte = static_cast<std::uint8_t>(number >> 24);
    }
  }
  for (const Method* method : methods_here()) {
    Choice choice{};
    for (auto& best : choice.best) best = method;
    std::uint32_t states[streams][8];
    std::vector<Run> runs;
    for (std::size_t i = 0; i < streams; ++i) {
      std::memcpy(states[i], initial_state, sizeof states[i]);
      runs.push_back({states[i], data[i].data(), data[i].size() / block_size});
    }
    hash_runs(choice, runs);
    std::printf("%s-%zu ", method->name, method->width);
    for (const auto& state : states) {
      for (const std::uint32_t word : state) std::printf("%08x", static_cast<unsigned>(word));
    }
    std::printf("\n");
  }
}
