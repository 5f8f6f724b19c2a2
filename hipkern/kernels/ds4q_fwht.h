// Owns the rotation that decoder 19's weights are stored in: signs, and the order of additions. The
// definition is artifact/formats/_fwht.py's, whose bits these functions give.
//
// Of 256 values: times the first signs; for strides 128, 64, .. 1, values i and i + stride become
// their sum and difference; times 1/16 and the last signs. The inverse swaps the signs.
#pragma once

#include "ds4q_dev.h"

#define DS4Q_TURN 256  // values that are rotated together
#define DS4Q_TURN_SCALE 0.0625f

// Signs of values 32 word to 32 word + 31, least significant bit first; 1 is plus.
DS4Q_FN ds4q_u32 ds4q_signs_before(int word) {
  return word == 0   ? 0x7e1f436fu
         : word == 1 ? 0x7dcca4dbu
         : word == 2 ? 0x656132f7u
         : word == 3 ? 0x3461ea31u
         : word == 4 ? 0x3f8ff8acu
         : word == 5 ? 0x57873038u
         : word == 6 ? 0x3f939d88u
                     : 0x408e25a3u;
}
DS4Q_FN ds4q_u32 ds4q_signs_after(int word) {
  return word == 0   ? 0x615eb361u
         : word == 1 ? 0x8eab84a4u
         : word == 2 ? 0x2481c03bu
         : word == 3 ? 0x511cc661u
         : word == 4 ? 0x3ad419b8u
         : word == 5 ? 0xbef3ec93u
         : word == 6 ? 0xee3a4271u
                     : 0x390fafe9u;
}
DS4Q_FN float ds4q_signed(float x, ds4q_u32 signs, int bit) {
  return ds4q_float(ds4q_bits(x) ^ (~(signs >> bit) << 31));
}
DS4Q_FN void ds4q_butterfly(float& low, float& high) {
  float sum = low + high;
  high = low - high;
  low = sum;
}
