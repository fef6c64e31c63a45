/* A libcrypto of which one function fails where a test says so; the system's does the work. GET_TAG and SET_TAG are
 * names too: only an encryption calls the one, only a decryption the other. */
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

char failing[32]; /* a function's name */
long passes;      /* calls of it that go well before the first that fails */
long failed;

static int fails(const char *name)
{
    return strcmp(name, failing) == 0 && __atomic_sub_fetch(&passes, 1, __ATOMIC_SEQ_CST) < 0 &&
           __atomic_add_fetch(&failed, 1, __ATOMIC_SEQ_CST) > 0;
}

static void *real(const char *name)
{
    void *library = dlopen("libcrypto.so.3", RTLD_NOW);
    return dlsym(library != NULL ? library : dlopen("libcrypto.so.1.1", RTLD_NOW), name);
}

#define FORWARD(type, name, takes, given)              \
    type name takes                                    \
    {                                                  \
        type (*function) takes = real(#name);          \
        return fails(#name) ? (type)0 : function given; \
    }

typedef unsigned char byte;
FORWARD(void *, EVP_CIPHER_CTX_new, (void), ())
FORWARD(const void *, EVP_aes_256_gcm, (void), ())
FORWARD(const void *, EVP_sha256, (void), ())
FORWARD(int, EVP_CipherInit_ex, (void *cipher, const void *type, void *engine, const byte *key, const byte *nonce, int to),
        (cipher, type, engine, key, nonce, to))
FORWARD(int, EVP_CipherUpdate, (void *cipher, byte *out, int *written, const byte *in, int nbytes),
        (cipher, out, written, in, nbytes))
FORWARD(int, EVP_CipherFinal_ex, (void *cipher, byte *out, int *written), (cipher, out, written))
FORWARD(byte *, HMAC, (const void *hash, const void *key, int nbytes, const byte *data, size_t size, byte *out, unsigned *length),
        (hash, key, nbytes, data, size, out, length))

int EVP_CIPHER_CTX_ctrl(void *cipher, int what, int nbytes, void *tag)
{
    int (*function)(void *, int, int, void *) = real("EVP_CIPHER_CTX_ctrl");
    return fails(what == 0x10 ? "GET_TAG" : "SET_TAG") ? 0 : function(cipher, what, nbytes, tag);
}

void EVP_CIPHER_CTX_free(void *cipher)
{
    void (*function)(void *) = real("EVP_CIPHER_CTX_free");
    function(cipher);
}
