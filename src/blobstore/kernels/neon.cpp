// NEON, which every arm64 processor has.
#define BLOBSTORE_TARGET neon_lanes
#define BLOBSTORE_TABLE neon
#define BLOBSTORE_NAME "neon"
#define BLOBSTORE_LANES 4
#include "target.h"
