//! The local ports of connections. The kernel picks them by a secret and a table it made at its boot, both shared by all guests
//! started from one snapshot: without a difference between them, clones use the same ports in the same order.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const SETTING: &str = "/proc/sys/net/ipv4/ip_local_port_range";
/// The kernel's default range.
const LOWEST: u16 = 32_768;
const HIGHEST: u16 = 60_999;
/// How far the lower end moves at most: more than 20,000 ports stay.
const SPREAD: u16 = 8_192;

/// Where the range is set.
#[derive(Debug)]
pub struct Range(File);

impl Range {
    /// # Errors
    /// Those of opening the setting.
    pub fn open() -> io::Result<Self> {
        File::options().write(true).open(SETTING).map(Self)
    }

    /// Begins the range at one of 4,096 places that `choice` picks.
    ///
    /// # Errors
    /// Those of writing the setting.
    pub fn shift(&self, choice: u16) -> io::Result<()> {
        self.0.write_all_at(format!("{}\t{HIGHEST}\n", begin(choice)).as_bytes(), 0)
    }
}

/// Even, as the kernel's default: connections take the ports of its parity first.
fn begin(choice: u16) -> u16 {
    LOWEST + ((choice % SPREAD) & !1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_begins_at_an_even_port_and_keeps_most_of_its_ports() {
        let begins: std::collections::BTreeSet<u16> = (0..=u16::MAX).map(begin).collect();
        assert_eq!(begins.len(), usize::from(SPREAD / 2));
        assert!(begins.iter().all(|port| port % 2 == 0 && (LOWEST..LOWEST + SPREAD).contains(port)));
    }
}
