//! The guest's name and its resolver: hostname, /etc/hostname, /etc/hosts, /etc/resolv.conf.
//!
//! /etc/hostname and /etc/hosts are mounts of files in memory, as containers have them, because every launch changes them and a
//! write to the disk would cost it milliseconds and blocks. What programs in the guest write to /etc/hosts goes to the disk as
//! well, so that it is there after a reboot. As in containers, neither can be renamed over, only written.

use std::fs;
use std::io;
use std::net::IpAddr;
use std::path::Path;

use nix::mount::{mount, MsFlags};
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};

use super::{replace_file, InPlace};
use crate::log;
use crate::process::fd::AsyncFile;

const HOSTNAME: &str = "/etc/hostname";
const HOSTS: &str = "/etc/hosts";
/// Their files in memory.
const HOSTNAME_IN_MEMORY: &str = "/run/aenv/hostname";
const HOSTS_IN_MEMORY: &str = "/run/aenv/hosts";

/// A longer /etc/hosts, the guest's doing, stays as it is.
const MAX_HOSTS: usize = 4 << 20;

/// The line of /etc/hosts that is ours, as Debian uses it for a machine's own name.
const OWN_ADDRESS: &str = "127.0.1.1";

/// Whether `name` can be a hostname: letters, digits, `-` and `.`, at most 64 characters.
pub fn is_hostname(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with(['-', '.'])
}

/// The files that name the machine.
#[derive(Debug)]
pub struct Names {
    hostname: InPlace,
    hosts: InPlace,
    /// What lies under the mount of `hosts`.
    hosts_on_disk: InPlace,
}

impl Names {
    /// Puts the files in memory over those of the disk; /run/aenv must be there.
    ///
    /// # Errors
    /// Those of creating and mounting the files.
    pub fn open() -> io::Result<Self> {
        let hosts_on_disk = on_disk(HOSTS)?;
        on_disk(HOSTNAME)?;
        let hosts = InPlace::open(Path::new(HOSTS_IN_MEMORY))?;
        hosts.write(&hosts_on_disk.read(MAX_HOSTS)?.unwrap_or_default())?;
        let hostname = InPlace::open(Path::new(HOSTNAME_IN_MEMORY))?;
        for (source, target) in [(HOSTNAME_IN_MEMORY, HOSTNAME), (HOSTS_IN_MEMORY, HOSTS)] {
            mount(Some(source), target, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        }
        Ok(Self { hostname, hosts, hosts_on_disk })
    }

    /// Names the machine, in the kernel and in both files.
    ///
    /// # Errors
    /// When the kernel refuses the name or a file cannot be written.
    pub fn set_hostname(&self, name: &str) -> io::Result<()> {
        nix::unistd::sethostname(name)?;
        self.hostname.write(format!("{name}\n").as_bytes())?;
        let Some(current) = self.hosts.read(MAX_HOSTS)? else { return Ok(()) };
        // What is no text in it is the guest's own loss.
        let wanted = hosts_with(&String::from_utf8_lossy(&current), name);
        if wanted.as_bytes() == current {
            return Ok(());
        }
        self.hosts.write(wanted.as_bytes())
    }

    /// Takes what others write to /etc/hosts to the disk, for ever.
    ///
    /// # Errors
    /// When the file cannot be watched.
    pub async fn keep_edits(&self) -> io::Result<std::convert::Infallible> {
        let changes = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC)?;
        // Our own writes are none of these: our descriptor stays open.
        inotify::add_watch(&changes, HOSTS_IN_MEMORY, WatchFlags::CLOSE_WRITE)?;
        let changes = AsyncFile::new(changes)?;
        loop {
            changes.read(&mut [0; 256]).await?;
            if let Err(error) = self.keep_hosts() {
                log!("cannot keep {HOSTS} on the disk: {error}");
            }
        }
    }

    fn keep_hosts(&self) -> io::Result<()> {
        match self.hosts.read(MAX_HOSTS)? {
            Some(content) => self.hosts_on_disk.write(&content),
            None => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("over {MAX_HOSTS} bytes"))),
        }
    }
}

/// The file of the image, made a regular one if it is none: a link may lead nowhere, and is nothing to mount over.
fn on_disk(path: &str) -> io::Result<InPlace> {
    let path = Path::new(path);
    if path.symlink_metadata().is_ok_and(|metadata| !metadata.is_file()) {
        let content = fs::read(path).unwrap_or_default();
        replace_file(path, &content)?;
    }
    InPlace::open(path)
}

/// Makes `resolver` the only name server.
///
/// # Errors
/// When the file cannot be written.
pub fn set_resolver(resolver: IpAddr) -> io::Result<()> {
    let (path, content) = (Path::new("/etc/resolv.conf"), format!("nameserver {resolver}\n"));
    match fs::read(path) {
        // An unchanged file stays out of the next snapshot's dirty blocks.
        Ok(current) if current == content.as_bytes() => Ok(()),
        _ => replace_file(path, content.as_bytes()),
    }
}

/// /etc/hosts with our line for `name`, every other line as it was, and localhost in any case.
fn hosts_with(current: &str, name: &str) -> String {
    let is = |line: &str, address: &str| line.split_whitespace().next() == Some(address);
    let mut lines: Vec<String> = current.lines().filter(|line| !is(line, OWN_ADDRESS)).map(str::to_owned).collect();
    if !lines.iter().any(|line| is(line, "127.0.0.1")) {
        lines.insert(0, "127.0.0.1\tlocalhost".into());
    }
    if !lines.iter().any(|line| is(line, "::1")) {
        lines.push("::1\tlocalhost ip6-localhost ip6-loopback".into());
    }
    let after_localhost = lines.iter().position(|line| is(line, "127.0.0.1")).map_or(0, |at| at + 1);
    lines.insert(after_localhost, format!("{OWN_ADDRESS}\t{name}"));
    lines.join("\n") + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostnames() {
        assert!(is_hostname("isbx123") && is_hostname("a.b-c"));
        for bad in ["", "-a", "a b", "a/b", "ü", &"a".repeat(65)] {
            assert!(!is_hostname(bad), "{bad}");
        }
    }

    #[test]
    fn hosts_keeps_other_lines_and_is_stable() {
        let first = hosts_with("127.0.0.1 localhost\n10.0.0.1 db\n127.0.1.1 old\n", "new");
        assert_eq!(
            first,
            "127.0.0.1 localhost\n127.0.1.1\tnew\n10.0.0.1 db\n::1\tlocalhost ip6-localhost ip6-loopback\n"
        );
        assert_eq!(hosts_with(&first, "new"), first);
        assert!(hosts_with("", "x").starts_with("127.0.0.1\tlocalhost\n127.0.1.1\tx\n"));
    }
}
