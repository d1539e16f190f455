/* The shared layout of a rig file: one mmapped file is one machine with its GPUs. Little-endian, 8-byte aligned.
   standin.py mirrors it with ctypes; gpuguard_rig_size() lets it check that both agree. */
#include <stdint.h>

#define MAX_GPUS 16
#define MAX_PROCESSES 64
#define MAX_MIG 7
#define MAX_LINKS 18

typedef struct {
  uint32_t pid;
  uint32_t sticky; /* keeps its memory after death, as an orphaned context does */
  uint64_t start;  /* field 22 of /proc/PID/stat: a reused pid is another process */
  uint64_t bytes;
} process_t;

typedef struct {
  uint32_t pid;
  uint64_t peak;     /* bytes */
  uint64_t start_us; /* epoch; when the process began to use the GPU */
} account_t; /* stays when the process is gone */

typedef struct {
  char uuid[96];
  char name[96];
  uint64_t total;
  uint64_t used;
} mig_t;

typedef struct {
  char name[96];
  char uuid[96];
  char bus[32];
  uint64_t total;
  uint64_t reserved;
  uint64_t leaked; /* held by nobody */
  uint64_t throttle_reasons;
  uint32_t cc_major, cc_minor;
  uint32_t minor_number;
  uint32_t ecc, mig, persistence; /* 0 off, 1 on, 2 not supported */
  uint32_t temperature_c, power_mw, power_limit_mw;
  uint32_t sm_mhz, memory_mhz, sm_max_mhz, memory_max_mhz;
  uint32_t pcie_gen, pcie_gen_now, pcie_width, pcie_width_max;
  uint32_t numa;
  uint32_t lost;               /* every call about it answers "GPU is lost" */
  uint32_t hang;               /* every call about it never returns */
  uint32_t memory_unsupported; /* GB10: neither v1 nor v2 */
  uint32_t links;              /* active NVLinks; 0: NVLink is not supported at all */
  uint32_t no_events;          /* 1: Xid events are not supported (WSL, MIG) */
  uint32_t xid, xids;          /* the last Xid, and how many there were: counting up raises the event */
  uint32_t double_bits;        /* double-bit ECC errors so far */
  uint32_t utilization;        /* percent; over 100: not supported */
  uint32_t accounting;         /* 0 off, 1 on, 2 not supported */
  uint32_t mig_count;
  char link_peer[MAX_LINKS][32]; /* PCI bus id at the other end; "" is not told */
  mig_t mig_device[MAX_MIG];
  process_t process[MAX_PROCESSES];
  account_t account[MAX_PROCESSES];
} gpu_t;

typedef struct {
  char magic[8];
  char driver[80];
  uint32_t count;
  uint32_t cuda;            /* 13000 is CUDA 13.0 */
  uint32_t init_result;     /* what nvmlInit returns */
  uint32_t init_hang;
  uint32_t crash;           /* the next call about a GPU aborts the process */
  uint32_t no_memory_v2;    /* a driver older than R510 */
  uint32_t processes_v2;    /* 1: a driver that has only the _v2 process list; 2: one that tells none */
  uint32_t no_event_reasons; /* a driver that knows them only as throttle reasons */
  uint32_t hide_processes;  /* a container */
  uint32_t hide_sizes;      /* WSL: pids without sizes */
  uint32_t chatty;          /* writes to stdout, as no library should */
  uint32_t delay_us;        /* before every call */
  uint32_t topology[MAX_GPUS][MAX_GPUS]; /* nvmlGpuTopologyLevel_t */
  uint32_t p2p[MAX_GPUS][MAX_GPUS];      /* nvmlGpuP2PStatus_t */
  gpu_t gpu[MAX_GPUS];
} rig_t;
