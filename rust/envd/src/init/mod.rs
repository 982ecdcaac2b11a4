//! PID 1: from the initramfs to a Linux userland on the root disk, and back down to power off.
//!
//! Everything runs before any thread exists. A failure on the way is told on the console and powers the machine off; the host
//! sees its VMM end. The kernel panics if PID 1 ends, so nothing here returns.

mod cmdline;
mod disk;
pub mod limits;
mod modules;
mod mounts;
mod network;
mod power;

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use crate::log;
use crate::machine::mailbox::Mailbox;
use crate::machine::{names, Machine};
use crate::server;
use crate::state::State;
use cmdline::Parameters;

/// All addresses: the host's requests come in on eth0, the guest's own programs use loopback.
const LISTEN_ON: &str = "0.0.0.0";
/// Where clients expect envd.
const PORT: u16 = 49983;
/// Requests that name no user act as this one until the host says otherwise.
const DEFAULT_USER: &str = "user";

/// Kernel settings, each with its reason. One that this kernel does not have is skipped.
const SYSCTLS: [(&str, &str); 10] = [
    // Warnings and worse on the console: it is the host's log of the sandbox.
    ("kernel/printk", "4 4 1 7"),
    // Development servers and editors watch whole trees.
    ("fs/inotify/max_user_watches", "1048576"),
    ("fs/inotify/max_user_instances", "8192"),
    // Databases and JITs map many regions.
    ("vm/max_map_count", "1048576"),
    // The sandbox's user may serve on port 80 and ping without being root.
    ("net/ipv4/ip_unprivileged_port_start", "0"),
    ("net/ipv4/ping_group_range", "0 2147483647"),
    // The slot's network is IPv4; an address the guest gave itself would only lead around its rules. Loopback keeps ::1.
    ("net/ipv6/conf/eth0/disable_ipv6", "1"),
    // Snapshots count changed pages; write-back soon after a change keeps disk and memory close.
    ("vm/dirty_expire_centisecs", "1000"),
    // Work that comes round by itself makes idle guests busy and their memory differ: statistics may lag by a megabyte, and
    // memory is compacted when that is needed.
    ("vm/stat_interval", "60"),
    ("vm/compaction_proactiveness", "0"),
];

/// Boots, serves with `serve`, and powers off when it returns.
pub fn run(serve: impl FnOnce(&str, u16, Arc<State>) -> io::Result<()>) -> ! {
    let outcome = boot().map_err(|error| format!("cannot boot: {error}")).and_then(|(machine, hostname)| {
        let state = Arc::new(State::new(Some(machine), DEFAULT_USER, limits::GUEST));
        server::rehearse(&state, &hostname);
        // The kernel makes it up when it is first read: only then do a capture and all that start from it agree on it.
        let _ = std::fs::read("/proc/sys/kernel/random/boot_id");
        serve(LISTEN_ON, PORT, state).map_err(|error| format!("cannot serve: {error}"))
    });
    match outcome {
        Ok(()) => log!("shutting down"),
        Err(error) => log!("fatal: {error}"),
    }
    power::off()
}

/// A failed step: what was being done, and why it failed.
#[derive(Debug, thiserror::Error)]
#[error("{action}: {source}")]
struct BootError {
    action: String,
    source: io::Error,
}

trait Context<T> {
    /// Names the step an error belongs to.
    fn context(self, action: impl FnOnce() -> String) -> Result<T, BootError>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, action: impl FnOnce() -> String) -> Result<T, BootError> {
        self.map_err(|error| BootError { action: action(), source: error.into() })
    }
}

/// The machine, and the name it is to have.
fn boot() -> Result<(Machine, String), BootError> {
    mounts::early()?;
    power::handle_ctrl_alt_del();
    let parameters = Parameters::read();
    modules::load_all(Path::new("/modules"));
    disk::wait_for(&parameters.root)?;
    disk::switch_to(&parameters.root)?;
    mounts::userland()?;
    limits::raise_own();
    report("interface", network::wait_for_interface());
    for (name, value) in SYSCTLS {
        // A kernel without the setting has nothing to set.
        let _ = fs::write(Path::new("/proc/sys").join(name), value);
    }
    // Without it the host greets us over the network.
    let mailbox = parameters.mailbox.and_then(|address| {
        Mailbox::open(address).inspect_err(|error| log!("no mailbox at {address:#x}: {error}")).ok()
    });
    let machine = Machine::open(parameters.gateway, mailbox).context(|| "opening what a launch changes".into())?;
    // A sandbox without a name or a network is still one a host can look into, on the console at least.
    // Write-back of a virtual disk is the host's business; throttling it here takes timers.
    let disk = parameters.root.trim_start_matches("/dev/");
    let _ = fs::write(format!("/sys/block/{disk}/queue/wbt_lat_usec"), "0");
    report("resolver", names::set_resolver(parameters.dns));
    report("network", network::configure(&parameters));
    log!("root {} on {}, {} via {}", parameters.root, parameters.hostname, parameters.address, parameters.gateway);
    Ok((machine, parameters.hostname))
}

fn report(what: &str, outcome: Result<(), impl std::fmt::Display>) {
    if let Err(error) = outcome {
        log!("{what}: {error}");
    }
}
