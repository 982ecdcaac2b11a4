//! The loopback and eth0 interfaces, through the classic socket ioctls: four calls need no netlink library.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::{socket, AddressFamily, SockFlag, SockType};

use super::cmdline::Parameters;
use super::{BootError, Context};

const INTERFACE: &str = "eth0";
/// As for the root disk: a virtual interface is there at once or never.
const DEADLINE: Duration = Duration::from_secs(5);
const INTERVAL: Duration = Duration::from_millis(5);

/// Brings both interfaces up, with eth0's address and the default route.
///
/// # Errors
/// When the kernel refuses a setting, or there is no eth0 to set.
pub fn configure(parameters: &Parameters) -> Result<(), BootError> {
    let socket = socket(AddressFamily::Inet, SockType::Datagram, SockFlag::SOCK_CLOEXEC, None)
        .context(|| "opening a socket".into())?;
    up(&socket, "lo").context(|| "bringing lo up".into())?;
    let address = parameters.address;
    set_address(&socket, libc::SIOCSIFADDR as _, address.ip).context(|| format!("setting the address {address}"))?;
    set_address(&socket, libc::SIOCSIFNETMASK as _, address.netmask())
        .context(|| format!("setting the netmask of {address}"))?;
    up(&socket, INTERFACE).context(|| format!("bringing {INTERFACE} up"))?;
    add_default_route(&socket, parameters.gateway)
        .context(|| format!("adding the default route via {}", parameters.gateway))
}

/// Waits until eth0 exists.
///
/// # Errors
/// After 5 seconds.
pub fn wait_for_interface() -> Result<(), BootError> {
    let started = Instant::now();
    while !Path::new("/sys/class/net").join(INTERFACE).exists() {
        if started.elapsed() > DEADLINE {
            return Err(io::Error::from(io::ErrorKind::TimedOut))
                .context(|| format!("{INTERFACE} did not appear within {DEADLINE:?}"));
        }
        std::thread::sleep(INTERVAL);
    }
    Ok(())
}

fn request(interface: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data; all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (slot, byte) in request.ifr_name.iter_mut().zip(interface.bytes().take(libc::IFNAMSIZ - 1)) {
        *slot = byte as libc::c_char;
    }
    request
}

fn up(socket: &OwnedFd, interface: &str) -> io::Result<()> {
    let mut request = request(interface);
    // SAFETY: both ioctls take an ifreq with a name; the flags member is the one SIOCGIFFLAGS fills in.
    unsafe {
        Errno::result(libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS as _, &mut request))?;
        request.ifr_ifru.ifru_flags |= (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        Errno::result(libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS as _, &request))?;
    }
    Ok(())
}

fn set_address(socket: &OwnedFd, operation: libc::Ioctl, ip: Ipv4Addr) -> io::Result<()> {
    let mut request = request(INTERFACE);
    request.ifr_ifru.ifru_addr = sockaddr(ip);
    // SAFETY: the address ioctls take an ifreq with a name and a sockaddr_in.
    Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), operation, &request) })?;
    Ok(())
}

fn add_default_route(socket: &OwnedFd, gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: rtentry is plain data; all zeroes is a valid value (no device, default metric).
    let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
    route.rt_dst = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = sockaddr(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = sockaddr(gateway);
    route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
    // SAFETY: SIOCADDRT takes an rtentry, which outlives the call.
    match Errno::result(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCADDRT as _, &route) }) {
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn sockaddr(ip: Ipv4Addr) -> libc::sockaddr {
    let address = libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: 0,
        // The octets in memory order are the network's order.
        sin_addr: libc::in_addr { s_addr: u32::from_ne_bytes(ip.octets()) },
        sin_zero: [0; 8],
    };
    // SAFETY: sockaddr_in and sockaddr have the same size, and every bit pattern is a valid sockaddr.
    unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) }
}
