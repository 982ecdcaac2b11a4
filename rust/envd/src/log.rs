//! Lines on the console, which the host keeps as the sandbox's serial log.

use std::fmt::Arguments;
use std::io::Write;

/// Writes `[envd] <seconds since boot> <message>`. Never fails: a daemon that is PID 1 must not die of a full or missing
/// console, and `eprintln!` would panic.
pub fn write(message: Arguments<'_>) {
    let uptime = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME)
        .map_or(0.0, |time| time.tv_sec() as f64 + time.tv_nsec() as f64 / 1e9);
    // One write per line, so that lines of several threads do not mix.
    let line = format!("[envd] {uptime:.3} {message}\n");
    let _ = std::io::stderr().write_all(line.as_bytes());
}

/// Logs a formatted line, see [`write`].
#[macro_export]
macro_rules! log {
    ($($argument:tt)*) => { $crate::log::write(format_args!($($argument)*)) };
}
