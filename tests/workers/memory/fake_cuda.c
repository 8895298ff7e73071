// A stand-in for the virtual memory calls of CUDA's driver, on memory of the host: physical memory
// is a memory file, addresses are those of the process, and access is what mprotect allows, so that
// other processes see what is written and a forbidden write ends the process. Every argument is
// checked: what the driver's documentation forbids is CUDA_ERROR_INVALID_VALUE. So is a call that
// FAKE_CUDA_REFUSES names, or access that it names.

#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };
enum { GRANULARITY = 2 << 20 };

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32_metadata;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
} Properties;
typedef struct { Location location; int flags; } Access;
typedef struct { int descriptor; size_t bytes; } Memory;

static size_t free_bytes(void) {
    const char *text = getenv("FAKE_CUDA_FREE_BYTES");
    return text ? strtoull(text, NULL, 10) : (size_t)1 << 40;
}

static int refuses(const char *name) {
    const char *refused = getenv("FAKE_CUDA_REFUSES");
    return refused && !strcmp(refused, name);
}

static int are_valid(const Properties *p) {
    return p->type == 1 && p->handle_types == 1 && p->location.type == 1 && p->location.id == 0 &&
           !p->win32_metadata && !p->compression && !p->rdma && !p->usage;
}

int cuGetErrorString(int status, const char **text) {
    *text = status == OUT_OF_MEMORY ? "out of memory" : "invalid argument";
    return SUCCESS;
}

int cuMemGetAllocationGranularity(size_t *bytes, const Properties *p, int option) {
    if (refuses(__func__)) return INVALID_VALUE;
    if (!are_valid(p) || option != 0) return INVALID_VALUE;
    *bytes = GRANULARITY;
    return SUCCESS;
}

int cuMemCreate(uint64_t *handle, size_t bytes, const Properties *p, uint64_t flags) {
    if (refuses(__func__)) return INVALID_VALUE;
    if (!are_valid(p) || !bytes || bytes % GRANULARITY || flags) return INVALID_VALUE;
    if (bytes > free_bytes()) return OUT_OF_MEMORY;
    Memory *memory = malloc(sizeof *memory);
    memory->bytes = bytes;
    memory->descriptor = memfd_create("fake-cuda", MFD_CLOEXEC);
    if (ftruncate(memory->descriptor, bytes)) abort();
    *handle = (uint64_t)memory;
    return SUCCESS;
}

int cuMemRelease(uint64_t handle) {
    Memory *memory = (Memory *)handle;
    close(memory->descriptor);
    free(memory);
    return SUCCESS;
}

int cuMemExportToShareableHandle(int *descriptor, uint64_t handle, int type, uint64_t flags) {
    if (refuses(__func__)) return INVALID_VALUE;
    if (type != 1 || flags) return INVALID_VALUE;
    *descriptor = dup(((Memory *)handle)->descriptor);
    return SUCCESS;
}

int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int type) {
    if (refuses(__func__)) return INVALID_VALUE;
    struct stat status;
    if (type != 1 || fstat((int)(intptr_t)descriptor, &status)) return INVALID_VALUE;
    Memory *memory = malloc(sizeof *memory);
    memory->bytes = status.st_size;
    memory->descriptor = dup((int)(intptr_t)descriptor);
    *handle = (uint64_t)memory;
    return SUCCESS;
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wish,
                        uint64_t flags) {
    if (refuses(__func__)) return INVALID_VALUE;
    if (!bytes || bytes % GRANULARITY || alignment || wish || flags) return INVALID_VALUE;
    char *start = mmap(NULL, bytes + GRANULARITY, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS |
                       MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    *address = ((uint64_t)start + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    return SUCCESS;
}

int cuMemAddressFree(uint64_t address, size_t bytes) {
    return munmap((void *)address, bytes) ? INVALID_VALUE : SUCCESS;
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    if (refuses(__func__)) return INVALID_VALUE;
    Memory *memory = (Memory *)handle;
    if (address % GRANULARITY || bytes != memory->bytes || offset || flags) return INVALID_VALUE;
    void *mapped = mmap((void *)address, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                        memory->descriptor, 0);
    return mapped == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

int cuMemUnmap(uint64_t address, size_t bytes) {
    void *mapped = mmap((void *)address, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED |
                        MAP_NORESERVE, -1, 0);
    return mapped == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}

int cuMemSetAccess(uint64_t address, size_t bytes, const Access *access, size_t count) {
    if (refuses(__func__)) return INVALID_VALUE;
    if (count != 1 || access->location.type != 1 || access->location.id) return INVALID_VALUE;
    if (access->flags != 1 && access->flags != 3) return INVALID_VALUE;
    if (access->flags == 1 && refuses("READ")) return INVALID_VALUE;
    int protection = access->flags == 3 ? PROT_READ | PROT_WRITE : PROT_READ;
    return mprotect((void *)address, bytes, protection) ? INVALID_VALUE : SUCCESS;
}
