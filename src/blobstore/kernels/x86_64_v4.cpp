// AVX-512: the level x86-64-v4 of the x86-64 psABI.
#define BLOBSTORE_TARGET avx512
#define BLOBSTORE_TABLE x86_64_v4
#define BLOBSTORE_NAME "x86-64-v4"
#define BLOBSTORE_LANES 16
#define BLOBSTORE_RUNS_HERE                                                                                        \
  (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") && \
   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
#include "target.h"
