//! `GET /metrics`: what the machine uses.

use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::Serialize;

/// Sizes in bytes unless the name says MiB.
#[derive(Debug, Serialize)]
pub struct Metrics {
    /// Unix seconds.
    ts: u64,
    cpu_count: usize,
    /// Percent of all CPUs since the previous call, 0..=100.
    cpu_used_pct: f64,
    mem_total_mib: u64,
    mem_used_mib: u64,
    mem_total: u64,
    /// Everything that is not available to programs.
    mem_used: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Measures; remembers the CPU's counters of the previous call.
#[derive(Debug, Default)]
pub struct Meter {
    previous: Mutex<CpuTime>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct CpuTime {
    busy: u64,
    total: u64,
}

impl Meter {
    /// The numbers as they are now; a file that cannot be read counts as zeros.
    pub fn measure(&self) -> Metrics {
        let read = |path| std::fs::read_to_string(path).unwrap_or_default();
        let stat = read("/proc/stat");
        let memory = read("/proc/meminfo");
        let (total, available) = (meminfo(&memory, "MemTotal"), meminfo(&memory, "MemAvailable"));
        let used = total.saturating_sub(available);
        let (disk_used, disk_total) = disk();
        Metrics {
            ts: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            cpu_count: cpu_count(&stat),
            cpu_used_pct: self.cpu_used(cpu_time(&stat)),
            mem_total_mib: total >> 20,
            mem_used_mib: used >> 20,
            mem_total: total,
            mem_used: used,
            mem_cache: meminfo(&memory, "Cached") + meminfo(&memory, "SReclaimable"),
            disk_used,
            disk_total,
        }
    }

    fn cpu_used(&self, now: CpuTime) -> f64 {
        let mut previous = self.previous.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = now.busy.saturating_sub(previous.busy);
        let total = now.total.saturating_sub(previous.total);
        *previous = now;
        if total == 0 {
            return 0.0;
        }
        let percent = busy as f64 * 100.0 / total as f64;
        (percent * 100.0).round() / 100.0
    }
}

/// The `cpu` line of /proc/stat: user nice system idle iowait irq softirq steal. Guest time is part of user time.
fn cpu_time(stat: &str) -> CpuTime {
    let fields = stat.lines().find_map(|line| line.strip_prefix("cpu ")).unwrap_or_default();
    let ticks: Vec<u64> = fields.split_whitespace().take(8).map(|field| field.parse().unwrap_or(0)).collect();
    let total = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    CpuTime { busy: total - idle, total }
}

fn cpu_count(stat: &str) -> usize {
    let is_cpu =
        |line: &&str| line.strip_prefix("cpu").is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    stat.lines().filter(is_cpu).count()
}

/// A line of /proc/meminfo in bytes; the file's unit is KiB.
fn meminfo(text: &str, name: &str) -> u64 {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    value.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0) << 10
}

/// Used and total bytes of the root filesystem.
fn disk() -> (u64, u64) {
    nix::sys::statvfs::statvfs("/").map_or((0, 0), |fs| {
        let total = fs.blocks() * fs.fragment_size();
        (total.saturating_sub(fs.blocks_free() * fs.fragment_size()), total)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 2\ncpu1 1 2\nctxt 5\n";

    #[test]
    fn cpu_use_is_the_share_since_the_previous_call() {
        let meter = Meter::default();
        assert_eq!(cpu_time(STAT), CpuTime { busy: 150, total: 1000 });
        assert_eq!(cpu_count(STAT), 2);
        assert_eq!(meter.cpu_used(cpu_time(STAT)), 15.0);
        assert_eq!(meter.cpu_used(CpuTime { busy: 151, total: 1003 }), 33.33);
        assert_eq!(meter.cpu_used(CpuTime { busy: 151, total: 1003 }), 0.0);
    }

    #[test]
    fn memory_is_in_bytes() {
        assert_eq!(meminfo("MemTotal:  2 kB\nMemAvailable: 1 kB\n", "MemAvailable"), 1024);
        assert_eq!(meminfo("", "MemTotal"), 0);
    }

    #[test]
    fn measures_this_machine() {
        let metrics = Meter::default().measure();
        assert!(metrics.cpu_count > 0 && metrics.mem_total > metrics.mem_used && metrics.disk_total > 0);
    }
}
