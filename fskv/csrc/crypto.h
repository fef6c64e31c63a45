/* Encryption of a chunk's rows with AES-256-GCM; docs/format.md, "Encrypted files". Knows nothing of Python.
 *
 * OpenSSL's libcrypto is opened at run time. A file has a key of its own: HKDF-SHA256 of a key of the operator's and 32
 * random bytes. So the number of a row is a nonce that no other bytes meet.
 */
#ifndef FSKV_CRYPTO_H
#define FSKV_CRYPTO_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { KEY_ID = 16, KEY = 32, SALT = 32, TAG = 16, SEAL = KEY_ID + SALT };

/* A key of the operator's; an id that is shorter ends with zeros. */
typedef struct {
    uint8_t id[KEY_ID], key[KEY];
} NamedKey;

/* The keys of an engine. The first writes, all read. */
typedef struct {
    pthread_mutex_t mutex; /* guards the two below */
    NamedKey *keys;
    size_t num;
} KeyRing;

/* What the rows of one file are bound to: `context` is the same for all files of a group. */
typedef struct {
    const uint8_t *context, *key;
    size_t context_nbytes, key_nbytes;
    uint32_t first_block;
} RowsOf;

enum { MAX_CONTEXT = 128 };

typedef struct {
    uint8_t key[KEY];
} FileKey;

/* Open libcrypto; false: it, or a function of it, is not there. */
bool crypto_load(const char *library);

/* Make the key of a new file, and the seal that its header has: id and random bytes. False: no randomness. */
bool new_file_key(KeyRing *ring, uint8_t seal[SEAL], FileKey *file_key);
/* Return whether the ring has the key that a seal names; then derive the file's. */
bool find_file_key(KeyRing *ring, const uint8_t seal[SEAL], FileKey *file_key);

/* Encrypt rows in place and write their tags, or check these and decrypt; the first row is number `first_row`. Returns
 * how many went well before another one: bytes from there on are of no use. */
size_t crypt_rows(const FileKey *file_key, const RowsOf *of, uint8_t *rows, size_t nbytes, size_t first_row,
                  uint8_t *tags, bool encrypt);

#endif
