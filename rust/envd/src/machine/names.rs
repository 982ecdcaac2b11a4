//! The guest's name and its resolver: hostname, /etc/hosts, /etc/resolv.conf.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use super::replace_file;

/// The line of /etc/hosts that is ours, as Debian uses it for a machine's own name.
const OWN_ADDRESS: &str = "127.0.1.1";

/// Whether `name` can be a hostname: letters, digits, `-` and `.`, at most 64 characters.
pub fn is_hostname(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'.';
    (1..=64).contains(&name.len()) && name.bytes().all(allowed) && !name.starts_with(['-', '.'])
}

/// Names the machine and writes the name to /etc/hostname and /etc/hosts.
///
/// # Errors
/// When the kernel refuses the name or a file cannot be written.
pub fn set_hostname(name: &str) -> io::Result<()> {
    nix::unistd::sethostname(name)?;
    update(Path::new("/etc/hostname"), &format!("{name}\n"))?;
    let hosts = Path::new("/etc/hosts");
    let current = std::fs::read_to_string(hosts).unwrap_or_default();
    update(hosts, &hosts_with(&current, name))
}

/// Makes `resolver` the only name server.
///
/// # Errors
/// When the file cannot be written.
pub fn set_resolver(resolver: IpAddr) -> io::Result<()> {
    update(Path::new("/etc/resolv.conf"), &format!("nameserver {resolver}\n"))
}

/// Writes only a difference: an unchanged file stays out of the next snapshot's dirty blocks.
fn update(path: &Path, content: &str) -> io::Result<()> {
    match std::fs::read(path) {
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
