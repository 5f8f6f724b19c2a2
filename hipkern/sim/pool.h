// Owns the OS threads that share the blocks of a launch. Knows no streams.
#pragma once
#include "fiber.h"

namespace sim {

// Runs all blocks of a launch; the calling thread takes part. Others are woken only after the
// launch has proved long, so that a small one costs no wake-up.
void run_launch(Launch& launch, unsigned threads);

}  // namespace sim
