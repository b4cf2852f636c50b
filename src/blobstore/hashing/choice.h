// Which methods a processor has, which of them is the fastest for how many streams, and how runs of
// different lengths share it. Compiled for any processor.
#pragma once

#include <algorithm>
#include <chrono>
#include <string_view>
#include <vector>

#include "sha256.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

namespace blobstore::hashing {

// CPUID leaf 7, EBX bit 29 (Intel SDM). GCC 12 does not know the feature by name.
inline bool has_sha_extensions() {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && b >> 29 & 1 && __builtin_cpu_supports("sse4.1");
#elif defined(__aarch64__) && defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_SHA2;
#elif defined(__aarch64__) && defined(__APPLE__)
  return true;  // every Apple processor has them
#else
  return false;
#endif
}

inline std::vector<const Method*> methods_here() {
  std::vector<const Method*> found;
  [[maybe_unused]] const auto add = [&](const auto& methods) {
    for (const Method& method : methods) found.push_back(&method);
  };
#if defined(__x86_64__)
  if (has_sha_extensions()) add(sha_ni);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                        __builtin_cpu_supports("fma");
  if (has_avx2) add(avx2);
  if (has_avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    add(avx512);
  }
#elif defined(__aarch64__)
  if (has_sha_extensions()) add(armv8);
#endif
  add(plain);
  return found;
}

// Nanoseconds for a block of each of its streams: the least of several measurements, since other
// programs interrupt some.
inline double pace_of(const Method& method) {
  constexpr std::size_t blocks = 16, rounds = 5;
  static const std::uint8_t data[blocks * block_size] = {};
  std::uint32_t states[max_width][8] = {};
  Run runs[max_width];
  const Run* all[max_width];
  for (std::size_t i = 0; i < method.width; ++i) {
    runs[i] = {states[i], data, blocks};
    all[i] = &runs[i];
  }
  double least = 1e18;
  for (std::size_t i = 0; i < rounds; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    method.advance(all, method.width, blocks);
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    least = std::min(least, took.count() / blocks);
  }
  return least;
}

// The method for each number of streams, from 1 on.
struct Choice {
  const Method* best[max_width];
};

// The fastest of `methods` for each number of streams.
inline Choice fastest(const std::vector<const Method*>& methods) {
  std::vector<double> paces;
  for (const Method* method : methods) paces.push_back(pace_of(*method));
  Choice choice{};
  for (std::size_t count = 1; count <= max_width; ++count) {
    double least = 1e18;
    for (std::size_t i = 0; i < methods.size(); ++i) {
      const std::size_t passes = (count - 1) / methods[i]->width + 1;
      const double pace = static_cast<double>(passes) * paces[i];
      if (pace < least) {
        least = pace;
        choice.best[count - 1] = methods[i];
      }
    }
  }
  return choice;
}

// Hashes all blocks of `runs`, the longest first, so that the lanes end together.
inline void hash_runs(const Choice& choice, std::vector<Run> runs) {
  std::stable_sort(runs.begin(), runs.end(),
                   [](const Run& a, const Run& b) { return a.blocks > b.blocks; });
  while (!runs.empty() && runs.back().blocks == 0) runs.pop_back();
  std::vector<Run*> active;
  std::size_t next = 0;
  for (;;) {
    while (active.size() < max_width && next < runs.size()) active.push_back(&runs[next++]);
    if (active.empty()) return;
    const Method& method = *choice.best[active.size() - 1];
    const std::size_t count = std::min(method.width, active.size());
    std::size_t blocks = active[0]->blocks;
    for (std::size_t i = 1; i < count; ++i) blocks = std::min(blocks, active[i]->blocks);
    method.advance(active.data(), count, blocks);
    for (std::size_t i = 0; i < count; ++i) {
      active[i]->data += blocks * block_size;
      active[i]->blocks -= blocks;
    }
    std::erase_if(active, [](const Run* run) { return run->blocks == 0; });
  }
}

}  // namespace blobstore::hashing
