/* Test library: keyed BLAKE3 of fskv/csrc/blake3.c by each of its paths, whatever this CPU would choose. */
#include "../../../fskv/csrc/blake3.c"

/* 0: plain C, 1: AVX2, 2: AVX-512. Returns 0 where the CPU does not have it. */
__attribute__((visibility("default"))) int keyed_by(int path, const uint8_t *key, const uint8_t *input,
                                                    size_t nbytes, uint8_t *digest)
{
    hash_eight = NULL;
#if defined(__x86_64__)
    if (path == 1 && __builtin_cpu_supports("avx2"))
        hash_eight = hash_eight_avx2;
    if (path == 2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl"))
        hash_eight = hash_eight_avx512;
#endif
    if (path != 0 && hash_eight == NULL)
        return 0;
    blake3_keyed(key, input, nbytes, digest);
    return 1;
}
