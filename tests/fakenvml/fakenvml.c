/* A libnvidia-ml.so.1 without a GPU: answers from the scenario file named by FAKENVML_SCENARIO.
 *
 * Only the calls below exist; for any other the loader finds no symbol, as with an old driver.
 * A scenario is text, one item a line, '#' starts a comment; README.md lists the items.
 * Time is counted in steps: the number of times that a GPU's memory was read, or whole seconds
 * since the library was loaded ("clock seconds").
 */
#define _DEFAULT_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef struct device *nvmlDevice_t;
typedef void *nvmlEventSet_t;

enum {
    OK = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
};
enum { MAX_GPUS = 16, MAX_ITEMS = 4096, MAX_STEP = 1 << 30 };
enum kind { COMPUTE, GRAPHICS, MPS };

struct memory { int gpu, step; u64 total, reserved, used; };
struct process { int gpu, first, last; unsigned pid, gi, ci; enum kind kind; u64 bytes; };
struct answer { char call[128]; int code, milliseconds, gpu, first, last; };
struct xid { int gpu, code, taken; unsigned gi, ci; };
struct device {
    int index, present, mig_parent, mig; /* mig_parent -1: a whole GPU */
    unsigned gi, ci;
    char uuid[128], name[128], pci[128];
    int utilization, temperature, milliwatts, ecc, remap[4], events;
    u64 ecc_counts[4]; /* volatile corrected, uncorrected; aggregate corrected, uncorrected */
    int reads;
};

static struct device devices[MAX_GPUS], instances[MAX_GPUS];
static struct memory memories[MAX_ITEMS];
static struct process processes[MAX_ITEMS];
static struct answer answers[MAX_ITEMS];
static struct xid xids[MAX_ITEMS];
static int gpu_count, instance_count, memory_count, process_count, answer_count, xid_count;
static int is_loaded, initialized, cuda = 13000, seconds_clock;
static char driver[80] = "580.65.06";
static struct timespec loaded;

static u64 size(const char *text)
{
    char *end;
    double value = strtod(text, &end);
    switch (*end) {
    case 'K': return (u64)(value * 1024);
    case 'M': return (u64)(value * 1024 * 1024);
    case 'G': return (u64)(value * 1024 * 1024 * 1024);
    default: return strtoull(text, NULL, 10);
    }
}

static void fail(const char *line)
{
    fprintf(stderr, "fakenvml: cannot read: %s\n", line);
    _exit(70);
}

static struct device *device_of(int gpu)
{
    if (gpu < 0 || gpu >= MAX_GPUS || !devices[gpu].present)
        fail("an item for a GPU that is not declared before it");
    return &devices[gpu];
}

static void parse_line(char *line)
{
    char word[64], a[128], b[128], c[128], d[128], kind[32];
    int gpu, x, y, z, w, n;
    unsigned pid, gi = 0xFFFFFFFF, ci = 0xFFFFFFFF;
    if (sscanf(line, "%63s", word) != 1 || word[0] == '#')
        return;
    if (!strcmp(word, "driver") && sscanf(line, "%*s %79s", driver) == 1) return;
    if (!strcmp(word, "cuda") && sscanf(line, "%*s %d", &cuda) == 1) return;
    if (!strcmp(word, "clock") && sscanf(line, "%*s %31s", kind) == 1) {
        seconds_clock = !strcmp(kind, "seconds");
        return;
    }
    if (!strcmp(word, "gpu") && sscanf(line, "%*s %d %95s %31s %95[^\n]", &gpu, a, b, c) == 4) {
        if (gpu < 0 || gpu >= MAX_GPUS) fail(line);
        struct device *device = &devices[gpu];
        memset(device, 0, sizeof *device);
        device->index = gpu; device->present = 1; device->mig_parent = -1;
        device->gi = device->ci = 0xFFFFFFFF;
        device->utilization = device->temperature = device->milliwatts = device->events = -1;
        device->remap[0] = -1;
        snprintf(device->uuid, sizeof device->uuid, "%s", a);
        snprintf(device->pci, sizeof device->pci, "%s", b);
        snprintf(device->name, sizeof device->name, "%s", c);
        if (gpu >= gpu_count) gpu_count = gpu + 1;
        return;
    }
    if (!strcmp(word, "mig") && sscanf(line, "%*s %d %u %u %95s %127s %127s %127s", &gpu, &gi, &ci, a, b, c, d) == 7) {
        struct device *device = &instances[instance_count];
        *device = *device_of(gpu);
        device_of(gpu)->mig = 1;
        device->mig_parent = gpu; device->gi = gi; device->ci = ci;
        device->index = MAX_GPUS + instance_count;
        snprintf(device->uuid, sizeof device->uuid, "%s", a);
        memories[memory_count++] = (struct memory){device->index, 0, size(b), size(c), size(d)};
        instance_count++;
        return;
    }
    if (!strcmp(word, "memory") && sscanf(line, "%*s %d %d %127s %127s %127s", &gpu, &x, a, b, c) == 5) {
        device_of(gpu);
        memories[memory_count++] = (struct memory){gpu, x, size(a), size(b), size(c)};
        return;
    }
    if (!strcmp(word, "process")) {
        n = sscanf(line, "%*s %d %d %d %u %31s %127s %u %u", &gpu, &x, &y, &pid, kind, a, &gi, &ci);
        if (n != 6 && n != 8) fail(line);
        enum kind which = !strcmp(kind, "graphics") ? GRAPHICS : !strcmp(kind, "mps") ? MPS : COMPUTE;
        u64 bytes = !strcmp(a, "hidden") ? ~0ULL : size(a);
        processes[process_count++] = (struct process){gpu, x, y < 0 ? MAX_STEP : y, pid, gi, ci, which, bytes};
        return;
    }
    if (!strcmp(word, "sensors") && sscanf(line, "%*s %d %d %d %d", &gpu, &x, &y, &z) == 4) {
        struct device *device = device_of(gpu);
        device->utilization = x; device->temperature = y; device->milliwatts = z;
        return;
    }
    if (!strcmp(word, "ecc") && sscanf(line, "%*s %d %d %d %d %d", &gpu, &x, &y, &z, &w) == 5) {
        struct device *device = device_of(gpu);
        device->ecc = 1;
        device->ecc_counts[0] = x; device->ecc_counts[1] = y;
        device->ecc_counts[2] = z; device->ecc_counts[3] = w;
        return;
    }
    if (!strcmp(word, "remapped") && sscanf(line, "%*s %d %d %d %d %d", &gpu, &x, &y, &z, &w) == 5) {
        int *remap = device_of(gpu)->remap;
        remap[0] = x; remap[1] = y; remap[2] = z; remap[3] = w;
        return;
    }
    if (!strcmp(word, "xid") && sscanf(line, "%*s %d %d", &gpu, &x) == 2) {
        device_of(gpu)->events = 1;
        sscanf(line, "%*s %*d %*d %u %u", &gi, &ci);
        xids[xid_count++] = (struct xid){gpu, x, 0, gi, ci};
        return;
    }
    x = 0; y = MAX_STEP; gpu = -1;
    if (!strcmp(word, "error") && (n = sscanf(line, "%*s %63s %d %d %d %d", a, &z, &gpu, &x, &y)) >= 2) {
        struct answer *answer = &answers[answer_count++];
        *answer = (struct answer){"", z, 0, gpu, x, y < 0 ? MAX_STEP : y};
        snprintf(answer->call, sizeof answer->call, "%s", a);
        return;
    }
    if (!strcmp(word, "delay") && (n = sscanf(line, "%*s %63s %d %d %d %d", a, &z, &gpu, &x, &y)) >= 2) {
        struct answer *answer = &answers[answer_count++];
        *answer = (struct answer){"", 0, z, gpu, x, y < 0 ? MAX_STEP : y};
        snprintf(answer->call, sizeof answer->call, "%s", a);
        return;
    }
    fail(line);
}

static void load(void)
{
    const char *path = getenv("FAKENVML_SCENARIO");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    clock_gettime(CLOCK_MONOTONIC, &loaded);
    if (!file) fail("FAKENVML_SCENARIO names no file");
    while (fgets(line, sizeof line, file)) {
        if (memory_count > MAX_ITEMS - 2 || process_count > MAX_ITEMS - 2 || answer_count > MAX_ITEMS - 2
            || xid_count > MAX_ITEMS - 2 || instance_count > MAX_GPUS - 2)
            fail("too many items");
        parse_line(line);
    }
    fclose(file);
}

static int step_of(const struct device *device)
{
    if (seconds_clock) {
        struct timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return (int)(now.tv_sec - loaded.tv_sec);
    }
    if (device && device->mig_parent >= 0) device = &devices[device->mig_parent];
    return device && device->reads ? device->reads - 1 : 0;
}

/* What the scenario says of one call: waits, then the code that the call must give, 0 for none. */
static int scripted(const char *call, const struct device *device)
{
    int gpu = device ? (device->mig_parent >= 0 ? device->mig_parent : device->index) : -1;
    int step = step_of(device);
    for (int i = 0; i < answer_count; i++) {
        const struct answer *answer = &answers[i];
        if (strcmp(answer->call, call) || (answer->gpu >= 0 && answer->gpu != gpu)) continue;
        if (step < answer->first || step >= answer->last) continue;
        if (answer->milliseconds < 0) for (;;) pause();
        if (answer->milliseconds) usleep((useconds_t)answer->milliseconds * 1000);
        if (answer->code) return answer->code;
    }
    return OK;
}

#define ENTER(device)                                                   \
    do {                                                                \
        if (!initialized) return UNINITIALIZED;                         \
        int scripted_code = scripted(__func__, device);                 \
        if (scripted_code) return scripted_code;                        \
    } while (0)

static int copy(char *to, unsigned length, const char *text)
{
    if (strlen(text) + 1 > length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return OK;
}

int nvmlInitWithFlags(unsigned flags)
{
    (void)flags;
    if (!is_loaded++) load();
    int code = scripted("nvmlInitWithFlags", NULL);
    if (code) return code;
    initialized++;
    return OK;
}
int nvmlShutdown(void)
{
    if (!initialized) return UNINITIALIZED;
    initialized--;
    return OK;
}
const char *nvmlErrorString(int code) { (void)code; return "fake error"; }
int nvmlSystemGetDriverVersion(char *text, unsigned length) { ENTER(NULL); return copy(text, length, driver); }
int nvmlSystemGetCudaDriverVersion(int *version) { ENTER(NULL); *version = cuda; return OK; }
int nvmlDeviceGetCount_v2(unsigned *count) { ENTER(NULL); *count = (unsigned)gpu_count; return OK; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (index >= (unsigned)gpu_count || !devices[index].present) return INVALID_ARGUMENT;
    ENTER(&devices[index]);
    *device = &devices[index];
    return OK;
}
int nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index) { ENTER(device); *index = (unsigned)device->index; return OK; }
int nvmlDeviceGetUUID(nvmlDevice_t device, char *text, unsigned length) { ENTER(device); return copy(text, length, device->uuid); }
int nvmlDeviceGetName(nvmlDevice_t device, char *text, unsigned length) { ENTER(device); return copy(text, length, device->name); }

struct pci_info { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; };
int nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, struct pci_info *pci)
{
    ENTER(device);
    memset(pci, 0, sizeof *pci);
    sscanf(device->pci, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", pci->domain, pci->bus, pci->device);
    return OK;
}

static int memory_at(struct device *device, u64 *total, u64 *reserved, u64 *used)
{
    device->reads++;
    const struct memory *best = NULL;
    int step = step_of(device);
    for (int i = 0; i < memory_count; i++)
        if (memories[i].gpu == device->index && memories[i].step <= step
            && (!best || memories[i].step >= best->step))
            best = &memories[i];
    if (!best) return NOT_SUPPORTED;
    *total = best->total; *reserved = best->reserved; *used = best->used;
    return OK;
}
struct memory_v1 { u64 total, free, used; };
int nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory_v1 *memory)
{
    ENTER(device);
    u64 reserved;
    int code = memory_at(device, &memory->total, &reserved, &memory->used);
    if (code) return code;
    memory->used += reserved; /* version 1 counts the driver's share as used */
    memory->free = memory->total - memory->used;
    return OK;
}
struct memory_v2 { unsigned version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *memory)
{
    ENTER(device);
    if (memory->version != 0x02000028) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    int code = memory_at(device, &memory->total, &memory->reserved, &memory->used);
    if (code) return code;
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}
struct utilization { unsigned gpu, memory; };
int nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilization *rates)
{
    ENTER(device);
    if (device->utilization < 0) return NOT_SUPPORTED;
    rates->gpu = (unsigned)device->utilization; rates->memory = 0;
    return OK;
}
int nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    ENTER(device);
    (void)sensor;
    if (device->temperature < 0) return NOT_SUPPORTED;
    *celsius = (unsigned)device->temperature;
    return OK;
}
int nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
    ENTER(device);
    if (device->milliwatts < 0) return NOT_SUPPORTED;
    *milliwatts = (unsigned)device->milliwatts;
    return OK;
}

/* The process structure grew once: version 1 has no instance ids. */
struct process_v1 { unsigned pid; u64 bytes; };
struct process_v2 { unsigned pid; u64 bytes; unsigned gi, ci; };
static int listed(const struct process *process, const struct device *device, enum kind kind)
{
    int gpu = device->mig_parent >= 0 ? device->mig_parent : device->index;
    int step = step_of(device);
    if (process->gpu != gpu || process->kind != kind) return 0;
    if (step < process->first || step >= process->last) return 0;
    return device->mig_parent < 0 || (process->gi == device->gi && process->ci == device->ci);
}
static int list(struct device *device, enum kind kind, unsigned *count, void *out, int version)
{
    unsigned found = 0;
    for (int i = 0; i < process_count; i++) found += (unsigned)listed(&processes[i], device, kind);
    if (found > *count || !out) {
        *count = found;
        return found ? INSUFFICIENT_SIZE : OK;
    }
    *count = 0;
    for (int i = 0; i < process_count; i++) {
        const struct process *p = &processes[i];
        if (!listed(p, device, kind)) continue;
        if (version == 1) ((struct process_v1 *)out)[(*count)++] = (struct process_v1){p->pid, p->bytes};
        else ((struct process_v2 *)out)[(*count)++] = (struct process_v2){p->pid, p->bytes, p->gi, p->ci};
    }
    return OK;
}
#define LISTS(name, kind)                                                                         \
    int nvmlDeviceGet##name##RunningProcesses(nvmlDevice_t d, unsigned *n, void *out)             \
    { ENTER(d); return list(d, kind, n, out, 1); }                                                \
    int nvmlDeviceGet##name##RunningProcesses_v2(nvmlDevice_t d, unsigned *n, void *out)          \
    { ENTER(d); return list(d, kind, n, out, 2); }                                                \
    int nvmlDeviceGet##name##RunningProcesses_v3(nvmlDevice_t d, unsigned *n, void *out)          \
    { ENTER(d); return list(d, kind, n, out, 3); }
LISTS(Compute, COMPUTE)
LISTS(Graphics, GRAPHICS)
LISTS(MPSCompute, MPS)

int nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    ENTER(device);
    *current = *pending = (unsigned)device->mig;
    return OK;
}
int nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    ENTER(device);
    *count = device->mig ? 7 : 0;
    return OK;
}
int nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *mig)
{
    ENTER(device);
    for (int i = 0; i < instance_count; i++)
        if (instances[i].mig_parent == device->index && index-- == 0) {
            *mig = &instances[i];
            return OK;
        }
    return NOT_FOUND;
}
int nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) { ENTER(device); *id = device->gi; return OK; }
int nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) { ENTER(device); *id = device->ci; return OK; }

int nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter, u64 *count)
{
    ENTER(device);
    if (!device->ecc) return NOT_SUPPORTED;
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *count = device->ecc_counts[counter * 2 + type];
    return OK;
}
int nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected, unsigned *pending, unsigned *failed)
{
    ENTER(device);
    if (device->remap[0] < 0) return NOT_SUPPORTED;
    *corrected = (unsigned)device->remap[0]; *uncorrected = (unsigned)device->remap[1];
    *pending = (unsigned)device->remap[2]; *failed = (unsigned)device->remap[3];
    return OK;
}

struct event_data { nvmlDevice_t device; u64 type, data; unsigned gi, ci; };
int nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, u64 *types)
{
    ENTER(device);
    *types = device->events > 0 ? 8 : 0; /* nvmlEventTypeXidCriticalError */
    return OK;
}
int nvmlEventSetCreate(nvmlEventSet_t *set) { ENTER(NULL); *set = malloc(1); return OK; }
int nvmlDeviceRegisterEvents(nvmlDevice_t device, u64 types, nvmlEventSet_t set)
{
    ENTER(device);
    (void)set;
    return device->events > 0 && types == 8 ? OK : NOT_SUPPORTED;
}
int nvmlEventSetWait_v2(nvmlEventSet_t set, struct event_data *event, unsigned milliseconds)
{
    ENTER(NULL);
    (void)set;
    for (int i = 0; i < xid_count; i++)
        if (!xids[i].taken) {
            xids[i].taken = 1;
            *event = (struct event_data){&devices[xids[i].gpu], 8, (u64)xids[i].code, xids[i].gi, xids[i].ci};
            return OK;
        }
    usleep((useconds_t)milliseconds * 1000);
    return TIMEOUT;
}
int nvmlEventSetFree(nvmlEventSet_t set) { free(set); return OK; }
