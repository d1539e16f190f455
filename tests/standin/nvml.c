/* A stand-in for libnvidia-ml.so.1: the machine is the rig file named by GPUGUARD_FAKE_RIG, which tests change while
   it is in use. Only what NVML's public header promises is imitated; every other symbol answers NOT_SUPPORTED. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rig.h"

enum result {
  SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9, TIMEOUT = 10, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, VERSION_MISMATCH = 25
};
typedef int result_t;
typedef struct { int gpu; int mig; /* -1: the whole GPU */ } handle_t;
typedef handle_t *device_t;

static rig_t *rig;
static int references;
static handle_t whole[MAX_GPUS], slices[MAX_GPUS][MAX_MIG];

size_t gpuguard_rig_size(void) { return sizeof(rig_t); }

/* --- the way in: every call passes one of these ---------------------------------------------------------------- */

static result_t enter(void) {
  if (!references) return UNINITIALIZED;
  if (rig->delay_us) usleep(rig->delay_us);
  if (rig->chatty && write(1, "NVML: hello\n", 12) < 0) return UNINITIALIZED;
  return SUCCESS;
}

static result_t touch(gpu_t *gpu) {
  if (rig->crash) abort();
  while (gpu->hang) usleep(10000);
  return gpu->lost ? GPU_IS_LOST : SUCCESS;
}

static result_t look_up(device_t device, gpu_t **gpu) {
  result_t result = enter();
  if (result != SUCCESS) return result;
  if (!device || device->gpu < 0 || (uint32_t)device->gpu >= rig->count) return INVALID_ARGUMENT;
  *gpu = &rig->gpu[device->gpu];
  return touch(*gpu);
}

#define GPU_OF(device) \
  gpu_t *gpu; \
  result_t result = look_up(device, &gpu); \
  if (result != SUCCESS) return result

static result_t give_text(char *out, unsigned size, const char *text) {
  if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
  strcpy(out, text);
  return SUCCESS;
}

static result_t give(unsigned *out, uint32_t value) {
  *out = value;
  return SUCCESS;
}

static result_t give_switch(unsigned *current, unsigned *pending, uint32_t value) {
  if (value > 1) return NOT_SUPPORTED;
  *current = *pending = value;
  return SUCCESS;
}

/* --- memory belongs to processes that live --------------------------------------------------------------------- */

static int alive(const process_t *process) {
  if (!process->pid) return 0;
  if (process->sticky) return 1;
  char path[64], stat_line[1024];
  snprintf(path, sizeof path, "/proc/%u/stat", process->pid);
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return 0;
  ssize_t length = read(file, stat_line, sizeof stat_line - 1);
  close(file);
  if (length <= 0) return 0;
  stat_line[length] = 0;
  char *field = strrchr(stat_line, ')'); /* the name before it may hold anything */
  if (!field) return 0;
  char state = field[2];
  int blanks = 0;
  for (field += 2; *field && blanks < 19; field++) blanks += *field == ' ';
  return state != 'Z' && state != 'X' && process->start == strtoull(field, NULL, 10);
}

static uint64_t held(const gpu_t *gpu) {
  uint64_t bytes = gpu->leaked;
  for (int i = 0; i < MAX_PROCESSES; i++)
    if (alive(&gpu->process[i])) bytes += gpu->process[i].bytes;
  return bytes;
}

/* --- the library and the system --------------------------------------------------------------------------------- */

static result_t map_rig(void) {
  const char *path = getenv("GPUGUARD_FAKE_RIG");
  int file = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
  struct stat facts;
  if (file < 0) return DRIVER_NOT_LOADED;
  void *map = MAP_FAILED;
  if (fstat(file, &facts) == 0 && (size_t)facts.st_size == sizeof(rig_t))
    map = mmap(NULL, sizeof(rig_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (map == MAP_FAILED || memcmp(map, "GPURIG3", 8)) return DRIVER_NOT_LOADED;
  rig = map;
  return SUCCESS;
}

result_t nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  if (!rig && map_rig() != SUCCESS) return DRIVER_NOT_LOADED;
  while (rig->init_hang) usleep(10000);
  if (rig->init_result) return rig->init_result;
  for (int i = 0; i < MAX_GPUS; i++) {
    whole[i] = (handle_t){i, -1};
    for (int j = 0; j < MAX_MIG; j++) slices[i][j] = (handle_t){i, j};
  }
  references++;
  return SUCCESS;
}
result_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
result_t nvmlShutdown(void) { return references ? (references--, SUCCESS) : UNINITIALIZED; }

const char *nvmlErrorString(result_t code) {
  static char text[32];
  snprintf(text, sizeof text, "stand-in error %d", code);
  return text;
}

result_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
  result_t result = enter();
  return result ? result : give_text(out, size, rig->driver);
}
result_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
  char text[96];
  result_t result = enter();
  if (result) return result;
  snprintf(text, sizeof text, "%u.%s", rig->cuda / 1000, rig->driver);
  return give_text(out, size, text);
}
result_t nvmlSystemGetCudaDriverVersion_v2(int *out) {
  result_t result = enter();
  if (!result) *out = rig->cuda;
  return result;
}
result_t nvmlSystemGetCudaDriverVersion(int *out) { return nvmlSystemGetCudaDriverVersion_v2(out); }
result_t nvmlDeviceGetCount_v2(unsigned *out) {
  result_t result = enter();
  return result ? result : give(out, rig->count);
}

/* --- handles ----------------------------------------------------------------------------------------------------- */

result_t nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *out) {
  result_t result = enter();
  if (result) return result;
  if (index >= rig->count) return INVALID_ARGUMENT;
  *out = &whole[index];
  return touch(&rig->gpu[index]);
}
result_t nvmlDeviceGetHandleByUUID(const char *uuid, device_t *out) {
  result_t result = enter();
  if (result) return result;
  for (uint32_t i = 0; i < rig->count; i++) {
    gpu_t *gpu = &rig->gpu[i];
    if (!strcmp(uuid, gpu->uuid)) {
      *out = &whole[i];
      return touch(gpu);
    }
    for (uint32_t j = 0; j < gpu->mig_count; j++)
      if (!strcmp(uuid, gpu->mig_device[j].uuid)) {
        *out = &slices[i][j];
        return touch(gpu);
      }
  }
  return NOT_FOUND;
}
result_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device_t *out) {
  result_t result = enter();
  if (result) return result;
  for (uint32_t i = 0; i < rig->count; i++)
    if (!strcasecmp(bus, rig->gpu[i].bus)) {
      *out = &whole[i];
      return touch(&rig->gpu[i]);
    }
  return NOT_FOUND;
}
result_t nvmlDeviceGetIndex(device_t device, unsigned *out) { GPU_OF(device); return give(out, device->gpu); }
result_t nvmlDeviceGetMinorNumber(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->minor_number); }
result_t nvmlDeviceGetName(device_t device, char *out, unsigned size) {
  GPU_OF(device);
  return give_text(out, size, device->mig < 0 ? gpu->name : gpu->mig_device[device->mig].name);
}
result_t nvmlDeviceGetUUID(device_t device, char *out, unsigned size) {
  GPU_OF(device);
  return give_text(out, size, device->mig < 0 ? gpu->uuid : gpu->mig_device[device->mig].uuid);
}

/* --- PCI, NUMA, links --------------------------------------------------------------------------------------------- */

typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } pci_t;

static result_t give_pci(pci_t *out, const char *bus) {
  memset(out, 0, sizeof *out);
  snprintf(out->bus_id, sizeof out->bus_id, "%s", bus);
  snprintf(out->legacy, sizeof out->legacy, "%s", strlen(bus) > 4 ? bus + 4 : bus);
  sscanf(bus, "%x:%x:%x", &out->domain, &out->bus, &out->device);
  return SUCCESS;
}
result_t nvmlDeviceGetPciInfo_v3(device_t device, pci_t *out) { GPU_OF(device); return give_pci(out, gpu->bus); }
result_t nvmlDeviceGetMaxPcieLinkGeneration(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->pcie_gen); }
result_t nvmlDeviceGetCurrPcieLinkGeneration(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->pcie_gen_now); }
result_t nvmlDeviceGetMaxPcieLinkWidth(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->pcie_width_max); }
result_t nvmlDeviceGetCurrPcieLinkWidth(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->pcie_width); }
result_t nvmlDeviceGetMemoryAffinity(device_t device, unsigned size, unsigned long *out, unsigned scope) {
  GPU_OF(device);
  (void)scope;
  if (!size) return INSUFFICIENT_SIZE;
  out[0] = 1ul << gpu->numa;
  return SUCCESS;
}
result_t nvmlDeviceGetTopologyCommonAncestor(device_t device, device_t other, unsigned *out) {
  GPU_OF(device);
  return give(out, rig->topology[device->gpu][other->gpu]);
}
result_t nvmlDeviceGetP2PStatus(device_t device, device_t other, unsigned index, unsigned *out) {
  GPU_OF(device);
  if (index == 2) return give(out, gpu->links && rig->gpu[other->gpu].links ? 0 : 5);
  return give(out, rig->p2p[device->gpu][other->gpu]);
}
result_t nvmlDeviceGetNvLinkState(device_t device, unsigned link, unsigned *out) {
  GPU_OF(device);
  if (!gpu->links) return NOT_SUPPORTED;
  return link < MAX_LINKS ? give(out, link < gpu->links) : INVALID_ARGUMENT;
}
result_t nvmlDeviceGetNvLinkRemotePciInfo_v2(device_t device, unsigned link, pci_t *out) {
  GPU_OF(device);
  if (link >= gpu->links || link >= MAX_LINKS) return INVALID_ARGUMENT;
  return gpu->link_peer[link][0] ? give_pci(out, gpu->link_peer[link]) : NOT_SUPPORTED;
}

/* --- memory and processes ------------------------------------------------------------------------------------------ */

typedef struct { unsigned long long total, free, used; } memory_v1_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2_t;

result_t nvmlDeviceGetMemoryInfo(device_t device, memory_v1_t *out) {
  GPU_OF(device);
  if (gpu->memory_unsupported) return NOT_SUPPORTED;
  uint64_t used = held(gpu) + gpu->reserved; /* v1 counts the reserve as used */
  *out = (memory_v1_t){gpu->total, gpu->total - used, used};
  return SUCCESS;
}
result_t nvmlDeviceGetMemoryInfo_v2(device_t device, memory_v2_t *out) {
  GPU_OF(device);
  if (rig->no_memory_v2) return FUNCTION_NOT_FOUND;
  if (gpu->memory_unsupported) return NOT_SUPPORTED;
  if (out->version != (0x2000000u | sizeof *out)) return VERSION_MISMATCH;
  unsigned version = out->version;
  if (device->mig >= 0) {
    mig_t *mig = &gpu->mig_device[device->mig];
    *out = (memory_v2_t){version, mig->total, 0, mig->total - mig->used, mig->used};
    return SUCCESS;
  }
  uint64_t used = held(gpu);
  *out = (memory_v2_t){version, gpu->total, gpu->reserved, gpu->total - gpu->reserved - used, used};
  return SUCCESS;
}

typedef struct { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; } process_info_t;

static result_t list_processes(const gpu_t *gpu, unsigned *count, process_info_t *out) {
  unsigned found = 0, room = *count;
  for (int i = 0; i < MAX_PROCESSES && !rig->hide_processes; i++) {
    const process_t *process = &gpu->process[i];
    if (!alive(process)) continue;
    if (out && found < room)
      out[found] = (process_info_t){process->pid, rig->hide_sizes ? ~0ull : process->bytes, ~0u, ~0u};
    found++;
  }
  *count = found;
  return found && (!out || found > room) ? INSUFFICIENT_SIZE : SUCCESS;
}
result_t nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *count, process_info_t *out) {
  GPU_OF(device);
  return rig->processes_v2 ? FUNCTION_NOT_FOUND : list_processes(gpu, count, out);
}
result_t nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *count, process_info_t *out) {
  GPU_OF(device);
  return rig->processes_v2 > 1 ? NOT_SUPPORTED : list_processes(gpu, count, out);
}
result_t nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned *count, process_info_t *out) {
  GPU_OF(device);
  (void)out;
  return give(count, 0);
}

typedef struct {
  unsigned gpu, memory;
  unsigned long long peak, time_ms, start_us;
  unsigned running, reserved[5];
} accounting_t;

result_t nvmlDeviceGetAccountingMode(device_t device, unsigned *out) {
  GPU_OF(device);
  return gpu->accounting > 1 ? NOT_SUPPORTED : give(out, gpu->accounting);
}
result_t nvmlDeviceGetAccountingStats(device_t device, unsigned pid, accounting_t *out) {
  GPU_OF(device);
  if (gpu->accounting > 1) return NOT_SUPPORTED;
  for (int i = 0; i < MAX_PROCESSES; i++)
    if (pid && gpu->account[i].pid == pid) {
      *out = (accounting_t){.peak = gpu->account[i].peak, .start_us = gpu->account[i].start_us};
      return SUCCESS;
    }
  return NOT_FOUND;
}

/* --- MIG, ECC, clocks, power ----------------------------------------------------------------------------------------- */

result_t nvmlDeviceGetMigMode(device_t device, unsigned *current, unsigned *pending) {
  GPU_OF(device);
  return give_switch(current, pending, gpu->mig);
}
result_t nvmlDeviceGetMaxMigDeviceCount(device_t device, unsigned *out) { GPU_OF(device); return give(out, MAX_MIG); }
result_t nvmlDeviceGetMigDeviceHandleByIndex(device_t device, unsigned index, device_t *out) {
  GPU_OF(device);
  if (index >= gpu->mig_count) return NOT_FOUND;
  *out = &slices[device->gpu][index];
  return SUCCESS;
}
result_t nvmlDeviceIsMigDeviceHandle(device_t device, unsigned *out) { GPU_OF(device); return give(out, device->mig >= 0); }
result_t nvmlDeviceGetEccMode(device_t device, unsigned *current, unsigned *pending) {
  GPU_OF(device);
  return give_switch(current, pending, gpu->ecc);
}
result_t nvmlDeviceGetPersistenceMode(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->persistence); }
result_t nvmlDeviceGetComputeMode(device_t device, unsigned *out) { GPU_OF(device); return give(out, 0); }
result_t nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor) {
  GPU_OF(device);
  *major = gpu->cc_major;
  *minor = gpu->cc_minor;
  return SUCCESS;
}
result_t nvmlDeviceGetClockInfo(device_t device, unsigned type, unsigned *out) {
  GPU_OF(device);
  return give(out, type == 2 ? gpu->memory_mhz : gpu->sm_mhz);
}
result_t nvmlDeviceGetMaxClockInfo(device_t device, unsigned type, unsigned *out) {
  GPU_OF(device);
  return give(out, type == 2 ? gpu->memory_max_mhz : gpu->sm_max_mhz);
}
result_t nvmlDeviceGetCurrentClocksThrottleReasons(device_t device, unsigned long long *out) {
  GPU_OF(device);
  *out = gpu->throttle_reasons;
  return SUCCESS;
}
result_t nvmlDeviceGetCurrentClocksEventReasons(device_t device, unsigned long long *out) {
  return rig->no_event_reasons ? FUNCTION_NOT_FOUND : nvmlDeviceGetCurrentClocksThrottleReasons(device, out);
}
typedef struct { unsigned gpu, memory; } utilization_t;
result_t nvmlDeviceGetUtilizationRates(device_t device, utilization_t *out) {
  GPU_OF(device);
  if (gpu->utilization > 100) return NOT_SUPPORTED;
  *out = (utilization_t){gpu->utilization, 0};
  return SUCCESS;
}
result_t nvmlDeviceGetTemperature(device_t device, unsigned sensor, unsigned *out) {
  GPU_OF(device);
  return sensor ? INVALID_ARGUMENT : give(out, gpu->temperature_c);
}
result_t nvmlDeviceGetPowerUsage(device_t device, unsigned *out) { GPU_OF(device); return give(out, gpu->power_mw); }
result_t nvmlDeviceGetPowerManagementLimit(device_t device, unsigned *out) {
  GPU_OF(device);
  return gpu->power_limit_mw ? give(out, gpu->power_limit_mw) : NOT_SUPPORTED;
}
result_t nvmlDeviceGetEnforcedPowerLimit(device_t device, unsigned *out) {
  GPU_OF(device);
  return gpu->power_limit_mw ? give(out, gpu->power_limit_mw) : NOT_SUPPORTED;
}

/* --- events --------------------------------------------------------------------------------------------------------- */

enum { DOUBLE_BIT_ECC = 2, XID_CRITICAL = 8 };
typedef struct { uint64_t types[MAX_GPUS]; uint32_t xids[MAX_GPUS], double_bits[MAX_GPUS]; } event_set_t;
typedef struct { device_t device; unsigned long long type, data; unsigned gpu_instance, compute_instance; } event_t;

static uint64_t event_types(device_t device, const gpu_t *gpu) {
  if (gpu->no_events || device->mig >= 0) return 0;
  return XID_CRITICAL | (gpu->ecc == 1 ? DOUBLE_BIT_ECC : 0);
}
result_t nvmlDeviceGetSupportedEventTypes(device_t device, unsigned long long *out) {
  GPU_OF(device);
  *out = event_types(device, gpu);
  return SUCCESS;
}
result_t nvmlEventSetCreate(event_set_t **out) {
  result_t result = enter();
  if (result) return result;
  *out = calloc(1, sizeof **out);
  return SUCCESS;
}
result_t nvmlEventSetFree(event_set_t *set) {
  free(set);
  return SUCCESS;
}
result_t nvmlDeviceRegisterEvents(device_t device, unsigned long long types, event_set_t *set) {
  GPU_OF(device);
  if (!types || types & ~event_types(device, gpu)) return NOT_SUPPORTED;
  set->types[device->gpu] |= types;
  set->xids[device->gpu] = gpu->xids; /* what came before is not told */
  set->double_bits[device->gpu] = gpu->double_bits;
  return SUCCESS;
}
result_t nvmlEventSetWait_v2(event_set_t *set, event_t *out, unsigned timeout_ms) {
  result_t result = enter();
  if (result) return result;
  for (unsigned waited = 0;; waited += 5) {
    int lost = 0;
    for (uint32_t i = 0; i < rig->count; i++) {
      gpu_t *gpu = &rig->gpu[i];
      if (!set->types[i]) continue;
      while (gpu->hang) usleep(10000);
      if (set->types[i] & XID_CRITICAL && gpu->xids != set->xids[i]) {
        set->xids[i]++;
        *out = (event_t){&whole[i], XID_CRITICAL, gpu->xid, ~0u, ~0u};
        return SUCCESS;
      }
      if (set->types[i] & DOUBLE_BIT_ECC && gpu->double_bits != set->double_bits[i]) {
        set->double_bits[i]++;
        *out = (event_t){&whole[i], DOUBLE_BIT_ECC, 1, ~0u, ~0u};
        return SUCCESS;
      }
      lost |= gpu->lost;
    }
    if (lost) return GPU_IS_LOST;
    if (waited >= timeout_ms) return TIMEOUT;
    usleep(5000);
  }
}
