/* Encryption of a chunk's rows with AES-256-GCM; docs/format.md, "Encrypted files". Knows nothing of Python.
 *
 * OpenSSL's libcrypto is opened at run time. A file has a key of its own: HKDF-SHA256 of a key of the operator's and 32
 * random bytes. So the number of a row is a nonce that no other bytes meet.
 */
#ifndef FSKV_CRYPTO_H
#define FSKV_CRYPTO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { KEY_ID = 16, KEY = 32, SALT = 32, TAG = 16, SEAL = KEY_ID + SALT, MAX_CONTEXT = 128 };

/* What the rows of one file are encrypted with and bound to: `context` is the same for all files of a group. `keys` are
 * those of an engine, each an id, filled up with zeros, and its key. The first writes, all read. */
typedef struct {
    const uint8_t *keys, *context, *key;
    size_t keys_nbytes, context_nbytes, key_nbytes;
    uint32_t first_block;
} RowsOf;

/* Open libcrypto; false: it, or a function of it, is not there. */
bool crypto_load(const char *library);

enum { NO_KEY = -1, CRYPT_FAILED = -2 };

/* Encrypt a file's rows in place, and write its seal and behind it their tags; or decrypt those from `first_row` on.
 * Returns how many went well before a wrong tag, NO_KEY, or CRYPT_FAILED where libcrypto or the kernel says no. What
 * did not go well is of no use. */
ssize_t crypt_rows(const RowsOf *of, uint8_t *rows, size_t nbytes, size_t first_row, uint8_t *seal, bool encrypt);

#endif
