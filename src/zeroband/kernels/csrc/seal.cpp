#include "seal.h"

#include <dlfcn.h>

#include <cstring>
#include <initializer_list>

namespace zeroband {
namespace {

constexpr int SET_IV_LENGTH = 0x9, GET_TAG = 0x10, SET_TAG = 0x11;  // EVP_CTRL_AEAD_*
constexpr int NONCE_BYTES = 12;

// The part of OpenSSL's EVP interface that is used; the same in 1.1 and 3.
struct Crypto {
    void* (*context_new)();
    void (*context_free)(void*);
    const void* (*aes_256_gcm)();
    int (*encrypt_init)(void*, const void*, void*, const uint8_t*, const uint8_t*);
    int (*encrypt_update)(void*, uint8_t*, int*, const uint8_t*, int);
    int (*encrypt_final)(void*, uint8_t*, int*);
    int (*decrypt_init)(void*, const void*, void*, const uint8_t*, const uint8_t*);
    int (*decrypt_update)(void*, uint8_t*, int*, const uint8_t*, int);
    int (*decrypt_final)(void*, uint8_t*, int*);
    int (*control)(void*, int, int, void*);
    const char* problem;
};

template <typename Function>
void find(void* library, const char* name, Function& function, const char*& problem) {
    void* symbol = dlsym(library, name);
    if (symbol == nullptr) problem = "libcrypto lacks a function of OpenSSL's EVP interface";
    std::memcpy(&function, &symbol, sizeof symbol);
}

Crypto load() {
    Crypto crypto{};
    void* library = nullptr;
    for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so", "libcrypto.3.dylib"})
        if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        crypto.problem = "there is no libcrypto (OpenSSL 1.1 or 3) on this machine";
        return crypto;
    }
    find(library, "EVP_CIPHER_CTX_new", crypto.context_new, crypto.problem);
    find(library, "EVP_CIPHER_CTX_free", crypto.context_free, crypto.problem);
    find(library, "EVP_aes_256_gcm", crypto.aes_256_gcm, crypto.problem);
    find(library, "EVP_EncryptInit_ex", crypto.encrypt_init, crypto.problem);
    find(library, "EVP_EncryptUpdate", crypto.encrypt_update, crypto.problem);
    find(library, "EVP_EncryptFinal_ex", crypto.encrypt_final, crypto.problem);
    find(library, "EVP_DecryptInit_ex", crypto.decrypt_init, crypto.problem);
    find(library, "EVP_DecryptUpdate", crypto.decrypt_update, crypto.problem);
    find(library, "EVP_DecryptFinal_ex", crypto.decrypt_final, crypto.problem);
    find(library, "EVP_CIPHER_CTX_ctrl", crypto.control, crypto.problem);
    return crypto;
}

const Crypto& crypto() {
    static const Crypto loaded = load();
    return loaded;
}

}  // namespace

const char* sealing_problem() { return crypto().problem; }

Sealer::Sealer(const uint8_t* key, bool seals) : context_(crypto().context_new()), seals_(seals) {
    const auto init = seals ? crypto().encrypt_init : crypto().decrypt_init;
    init(context_, crypto().aes_256_gcm(), nullptr, nullptr, nullptr);
    crypto().control(context_, SET_IV_LENGTH, NONCE_BYTES, nullptr);
    init(context_, nullptr, nullptr, key, nullptr);
}

Sealer::~Sealer() { crypto().context_free(context_); }

bool Sealer::start(const uint8_t* header, size_t header_bytes) {
    uint8_t nonce[NONCE_BYTES] = {};
    for (int i = 0; i < 8; ++i) nonce[4 + i] = static_cast<uint8_t>(number_ >> (56 - 8 * i));
    ++number_;
    const auto init = seals_ ? crypto().encrypt_init : crypto().decrypt_init;
    const auto update = seals_ ? crypto().encrypt_update : crypto().decrypt_update;
    int length = 0;
    return init(context_, nullptr, nullptr, nullptr, nonce) == 1 &&
           update(context_, nullptr, &length, header, static_cast<int>(header_bytes)) == 1;
}

bool Sealer::seal(const uint8_t* header, size_t header_bytes, const uint8_t* in, size_t n, uint8_t* out) {
    int length = 0;
    return start(header, header_bytes) &&
           (n == 0 || crypto().encrypt_update(context_, out, &length, in, static_cast<int>(n)) == 1) &&
           crypto().encrypt_final(context_, out + n, &length) == 1 &&
           crypto().control(context_, GET_TAG, TAG_BYTES, out + n) == 1;
}

bool Sealer::open(const uint8_t* header, size_t header_bytes, uint8_t* data, size_t n) {
    int length = 0;
    uint8_t rest[TAG_BYTES];
    return start(header, header_bytes) &&
           (n == 0 || crypto().decrypt_update(context_, data, &length, data, static_cast<int>(n)) == 1) &&
           crypto().control(context_, SET_TAG, TAG_BYTES, data + n) == 1 &&
           crypto().decrypt_final(context_, rest, &length) == 1;
}

}  // namespace zeroband
