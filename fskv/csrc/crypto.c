#define _GNU_SOURCE
#include "crypto.h"

#include <dlfcn.h>
#include <string.h>
#include <sys/random.h>

#include "chunk_io.h"

enum { GET_TAG = 0x10, SET_TAG = 0x11, NONCE = 12 }; /* of <openssl/evp.h>, the same since 1.1 */

/* Functions of libcrypto, by their names there. */
#define FUNCTIONS(DO)                                                                                          \
    DO(void *, EVP_CIPHER_CTX_new, (void))                                                                     \
    DO(void, EVP_CIPHER_CTX_free, (void *))                                                                    \
    DO(int, EVP_CIPHER_CTX_ctrl, (void *, int, int, void *))                                                   \
    DO(const void *, EVP_aes_256_gcm, (void))                                                                  \
    DO(int, EVP_CipherInit_ex, (void *, const void *, void *, const uint8_t *, const uint8_t *, int))          \
    DO(int, EVP_CipherUpdate, (void *, uint8_t *, int *, const uint8_t *, int))                                \
    DO(int, EVP_CipherFinal_ex, (void *, uint8_t *, int *))                                                    \
    DO(const void *, EVP_sha256, (void))                                                                       \
    DO(uint8_t *, HMAC, (const void *, const void *, int, const uint8_t *, size_t, uint8_t *, unsigned *))
#define FIELD(type, name, arguments) type(*name) arguments;
typedef struct {
    FUNCTIONS(FIELD)
} Functions;

static Functions ssl; /* of the first library that has all of them: others may be using it */

bool crypto_load(const char *library)
{
    Functions found;
    void *opened = dlopen(library, RTLD_NOW | RTLD_LOCAL); /* for good */
    if (opened == NULL)
        return false;
#define LOOK_UP(type, name, arguments)                                       \
    if ((found.name = (type(*) arguments)dlsym(opened, #name)) == NULL)      \
        return false;
    FUNCTIONS(LOOK_UP)
    if (ssl.HMAC == NULL)
        ssl = found;
    return true;
}

static bool hmac(const uint8_t key[KEY], const uint8_t *data, size_t nbytes, uint8_t out[KEY])
{
    return ssl.HMAC(ssl.EVP_sha256(), key, KEY, data, nbytes, out, NULL) != NULL;
}

/* HKDF-SHA256 (RFC 5869) of one block of output. */
static bool derive(const uint8_t key[KEY], const uint8_t salt[SALT], uint8_t file_key[KEY])
{
    static const uint8_t info[] = "fskv row key\x01";
    uint8_t extracted[KEY];
    bool good = hmac(salt, key, KEY, extracted) && hmac(extracted, info, sizeof info - 1, file_key);
    explicit_bzero(extracted, sizeof extracted);
    return good;
}

static uint8_t *put_u32(uint8_t *at, size_t value)
{
    for (int i = 0; i < 4; i++)
        *at++ = (uint8_t)(value >> 8 * i);
    return at;
}

/* One row in place. A tag is checked only after its bytes: nobody may use them before. */
static bool crypt_row(void *cipher, const RowsOf *of, uint8_t *row, size_t nbytes, size_t number, uint8_t *tag,
                      bool encrypt, bool *wrong_tag)
{
    uint8_t bound[MAX_CONTEXT + 12 + 255], nonce[NONCE] = {0}, *at = bound;
    int written;
    memcpy(at, of->context, of->context_nbytes);
    at = put_u32(at + of->context_nbytes, of->first_block);
    at = put_u32(put_u32(at, number), nbytes);
    memcpy(at, of->key, of->key_nbytes);
    at += of->key_nbytes;
    put_u32(nonce, number);
    if (ssl.EVP_CipherInit_ex(cipher, NULL, NULL, NULL, nonce, -1) != 1 ||
        ssl.EVP_CipherUpdate(cipher, NULL, &written, bound, (int)(at - bound)) != 1 ||
        ssl.EVP_CipherUpdate(cipher, row, &written, row, (int)nbytes) != 1 || (size_t)written != nbytes ||
        (!encrypt && ssl.EVP_CIPHER_CTX_ctrl(cipher, SET_TAG, TAG, tag) != 1))
        return false;
    bool good = ssl.EVP_CipherFinal_ex(cipher, row, &written) == 1;
    *wrong_tag = !good && !encrypt;
    return good && (!encrypt || ssl.EVP_CIPHER_CTX_ctrl(cipher, GET_TAG, TAG, tag) == 1);
}

ssize_t crypt_rows(const RowsOf *of, uint8_t *rows, size_t nbytes, size_t first_row, uint8_t *seal, bool encrypt)
{
    const uint8_t *key = of->keys, *end = key + of->keys_nbytes;
    if (ssl.HMAC == NULL)
        return CRYPT_FAILED;
    if (encrypt) {
        memcpy(seal, key, KEY_ID);
        if (getrandom(seal + KEY_ID, SALT, 0) != SALT)
            return CRYPT_FAILED;
    }
    while (key < end && memcmp(key, seal, KEY_ID) != 0)
        key += KEY_ID + KEY;
    if (key == end)
        return NO_KEY;
    uint8_t file_key[KEY];
    ssize_t done = 0;
    bool wrong_tag = false;
    void *cipher = ssl.EVP_CIPHER_CTX_new();
    bool good = cipher != NULL && derive(key + KEY_ID, seal + KEY_ID, file_key) &&
                ssl.EVP_CipherInit_ex(cipher, ssl.EVP_aes_256_gcm(), NULL, file_key, NULL, encrypt) == 1;
    for (size_t at = 0, row = first_row; good && at < nbytes; at += ROW, row++, done += good) {
        size_t length = nbytes - at < ROW ? nbytes - at : ROW;
        good = crypt_row(cipher, of, rows + at, length, row, seal + SEAL + TAG * row, encrypt, &wrong_tag);
    }
    explicit_bzero(file_key, sizeof file_key);
    ssl.EVP_CIPHER_CTX_free(cipher);
    return good || wrong_tag ? done : CRYPT_FAILED;
}
