/* XXH3-64 with seed 0 and the default secret, of inputs longer than 240 bytes: rows and headers, all of them
 * multiples of 4096. Facts: the XXH3 part of the xxHash specification. tests/unit/test_native.py holds it against
 * the `xxhash` package byte for byte, and tests/unit/test_processors.py does on other processors.
 */
#ifndef FSKV_XXH3_H
#define FSKV_XXH3_H

#include <stddef.h>
#include <stdint.h>

#define XXH3_MIN_NBYTES 241

/* Chosen once, when the module is loaded: AVX2 where the CPU has it, NEON on aarch64, plain C otherwise. */
void xxh3_init(void);
uint64_t xxh3_64(const uint8_t *input, size_t nbytes);

#endif
