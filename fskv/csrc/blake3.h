/* Keyed BLAKE3 of rows: what seals the rows of a sealed file (fskv.format.mac). Facts: the BLAKE3 specification.
 * tests/unit/test_native.py holds it against the `blake3` package byte for byte, each path of it, and
 * tests/unit/test_processors.py on other processors. Where the CPU has no AVX2 that package is used.
 */
#ifndef FSKV_BLAKE3_H
#define FSKV_BLAKE3_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BLAKE3_MAX_NBYTES 65536
#define BLAKE3_KEY_NBYTES 32
#define BLAKE3_ROW_DIGEST_NBYTES 16

/* Chosen once, when the module is loaded: AVX-512 or AVX2 where the CPU has it, plain C otherwise. */
void blake3_init(void);
/* Whether it is not plain C, which is slower than the package. */
bool blake3_fast(void);
/* The first 16 bytes of the keyed hash of 1 to BLAKE3_MAX_NBYTES bytes. */
void blake3_keyed(const uint8_t key[BLAKE3_KEY_NBYTES], const uint8_t *input, size_t nbytes,
                  uint8_t digest[BLAKE3_ROW_DIGEST_NBYTES]);

#endif
