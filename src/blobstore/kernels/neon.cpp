// NEON, which every arm64 processor has.
#define BLOBSTORE_TARGET neon_lanes
#define BLOBSTORE_TABLE neon
#define BLOBSTORE_NAME "neon"
#define BLOBSTORE_LANES 4
#define BLOBSTORE_RUNS_HERE true
#include "target.h"
