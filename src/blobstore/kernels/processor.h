// Which targets a build has, and which of them this processor runs. Included by files that are
// compiled for any processor.
#pragma once

#include "kernels.h"

namespace blobstore {

// The best first.
inline constexpr const Target* targets[] = {
#if defined(__x86_64__)
    &x86_64_v4, &x86_64_v3,
#elif defined(__aarch64__)
    &neon,
#endif
    &plain};

// Whether the processor has all that the compiler may use for a level of the x86-64 psABI, and the
// system its registers.
inline bool runs_here(const Target& target) {
#if defined(__x86_64__) && defined(__clang__) && __clang_major__ < 19
  // These do not know the levels by name. Every processor with these features has the rest of its
  // level.
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") &&
                  __builtin_cpu_supports("fma");
  if (&target == &x86_64_v3) return v3;
  if (&target == &x86_64_v4) {
    return v3 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  }
#elif defined(__x86_64__)
  if (&target == &x86_64_v3) return __builtin_cpu_supports("x86-64-v3");
  if (&target == &x86_64_v4) return __builtin_cpu_supports("x86-64-v4");
#endif
  static_cast<void>(target);
  return true;
}

}  // namespace blobstore
